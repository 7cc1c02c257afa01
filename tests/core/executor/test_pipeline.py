"""Pipeline stages as threads: texts, and everything a request may ask for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from inl import EngineConfig
from inl.errors import RequestError, RunnerError, WeightMismatch
from inl.executor.load_plan import LoadPlan
from inl.executor.model_loader import LanguageModel
from inl.executor.pipeline import Stage
from inl.models.llama import MODEL
from inl.plugin import make_backend
from inl.runners.startup import start
from inl.spec.limits import Limits
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama
from inl.testing.traffic import Traffic, play
from rank_engines import over, runner_over

CONFIG = EngineConfig(
    backend="reference", dtype="float32", context=64, max_batch=3, token_budget=16
)
LIMITS = Limits(slots=8, blocks=(80,), block_size=4, max_blocks_per_seq=12, vocab=96)
PROMPTS = [[5, 17, 80, 3, 44, 9], [61], [7, 7, 12, 90, 33] * 7]
STEPS = 40


def made(seed=21, **sizes):
    return tiny_llama(np.random.default_rng(seed), layers=5, **sizes)


def language_of(config, tensors):
    files = MemoryCheckpoint(config, tensors)
    return LanguageModel(MODEL, MODEL.config(config), files)


def texts(runner, seed=3):
    try:
        return play(runner, Traffic(np.random.default_rng(seed), LIMITS).frames(STEPS))
    finally:
        runner.close()


@pytest.fixture(scope="module")
def model():
    return made(kv_heads=4, bias=True)


@pytest.fixture(scope="module")
def language(model):
    return language_of(*model)


@pytest.fixture(scope="module")
def alone(language):
    return texts(runner_over(language, 1, CONFIG, limits=LIMITS))


@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (3, 1), (5, 1), (2, 2), (3, 4)])
def test_mixed_steps_give_the_texts_of_one_device(language, alone, stages, ranks):
    found = texts(runner_over(language, ranks, CONFIG, stages, limits=LIMITS))
    assert found == alone
    assert sum(map(len, found.values())) > STEPS


def test_answers_are_those_of_an_uncached_float64_computation(model, language):
    with over(language, 2, CONFIG, 3) as engine:
        found = engine.generate(PROMPTS, max_tokens=16)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids = [*prompt, *answer.token_ids]
        exact = plain_logits(*model, ids[:-1])[-16:]
        assert list(answer.token_ids) == list(exact.argmax(-1))


def flat(scores):
    return [scores.logprob, *(logprob for _, logprob in scores.top)]


OPTIONS = {
    "sampled": {"temperature": 1.2, "seed": 5},
    "filtered": {"temperature": 1.1, "seed": 4, "top_k": 20, "top_p": 0.9,
                 "repetition_penalty": 1.3, "logprobs": 5},
    "biased": {"logit_bias": {95: 6.0}, "presence_penalty": 0.4, "logprobs": 3},
    "banned": {"allowed_token_ids": [1, 2, 3, 4, 95]},
    "prompt": {"prompt_logprobs": 2},
    "samples": {"n": 3, "temperature": 1.0, "seed": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_requests(language, name):
    found = []
    for stages in (1, 3):
        with over(language, 1, CONFIG, stages) as engine:
            answers = engine.generate(PROMPTS, max_tokens=8, **OPTIONS[name])
            found.append([
                one
                for answer in answers
                for one in (answer if isinstance(answer, list) else [answer])
            ])  # fmt: skip
    for whole, staged in zip(*found, strict=True):
        assert whole.token_ids == staged.token_ids
        assert whole.prompt_logprobs == staged.prompt_logprobs
        # Steps have other rows, whose products round in other orders.
        for one, other in zip(whole.logprobs or (), staged.logprobs or (), strict=True):
            assert flat(one) == pytest.approx(flat(other), abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"speculation": "ngram"}, {"decode_steps": 4}, {"prefix_cache": False},
     {"cache_bytes": 170_000}, {"depth": 1}],
    ids=str,
)  # fmt: skip
def test_settings_of_engines(language, settings):
    config, found = replace(CONFIG, **settings), []
    # Few bytes: the stages of fewer layers have room for more blocks, and use as many.
    for stages in (1, 3):
        own = config
        if stages == 3 and config.cache_bytes:
            own = replace(config, cache_bytes=config.cache_bytes * 2 // 5)
        with over(language, 1, own, stages) as engine:
            found.append([a.token_ids for a in engine.generate(PROMPTS, max_tokens=12)])
            if config.cache_bytes:
                assert engine.runner.limits.blocks == (9,)
    assert found[0] == found[1]


def test_hidden_states_of_texts(language):
    found = []
    for stages in (1, 2):
        with over(language, 1, CONFIG, stages) as engine:
            found.append(np.array(engine.embed(PROMPTS)))
    assert np.array_equal(found[0], found[1])


def test_a_tied_model_has_its_table_on_both_ends():
    language = language_of(*made(tied=True))
    alone = texts(runner_over(language, 1, CONFIG, limits=LIMITS))
    assert texts(runner_over(language, 1, CONFIG, 2, limits=LIMITS)) == alone


@pytest.mark.parametrize("index", range(3))
def test_a_stage_plans_its_own_weights_and_caches(language, index):
    plan = LoadPlan.of(
        language, make_backend("reference"), CONFIG, stage=Stage(index, 3)
    )
    names = {
        param.source
        for group in leaves(plan.unloaded.groups)
        for param in group.group.params.values()
    }
    layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
    assert layers == [{0}, {1, 2}, {3, 4}][index]
    assert ("model.embed_tokens.weight" in names) == (index == 0)
    assert ("lm_head.weight" in names) == (index == 2)
    assert ("model.norm.weight" in names) == (index == 2)
    (cache,) = plan.unloaded.shard_state()
    assert {*cache.layers} == layers


def test_what_stages_cannot_do_is_refused_before_a_start(language, tmp_path):
    for config, kind, words in (
        ({"placement": "pipeline=6"}, WeightMismatch, "pipeline=6 for 5 layers; .*5"),
        ({"placement": "pipeline=2", "max_adapters": 1}, RequestError, "adapters: .*1"),
    ):
        settings = EngineConfig(backend="reference", **config)
        with pytest.raises(kind, match=words):
            start(language, settings)
        with pytest.raises(kind, match=words):
            LoadPlan.of(language, make_backend("reference"), settings)


def test_the_plan_of_a_stage_cannot_be_loaded_alone(language):
    config = EngineConfig(backend="reference", placement="pipeline=2")
    plan = LoadPlan.of(language, make_backend("reference"), config)
    with pytest.raises(RunnerError, match="plan for a rank of 2 outside of their"):
        plan.load(lambda *_: None)


def of_class(change):
    """Return a change of collectives whose ``send`` or ``recv`` is another."""

    def wrap(real):
        changed = type(f"Faulty{type(real).__name__}", (type(real),), change)
        real.__class__ = changed
        return real

    return wrap


def stale_recv(self, spec, axis, source):
    found = type(self).__mro__[1].recv(self, spec, axis, source)
    before = self.__dict__.get("before", found)
    self.before = found
    return before if before.shape == found.shape else found


def swapped_rows(self, x, axis, target):
    first = type(self).__mro__[1].send
    first(self, x[::-1] if len(x) > 1 else x, axis, target)


@pytest.mark.parametrize(
    "change", [{"recv": stale_recv}, {"send": swapped_rows}], ids=["stale", "rows"]
)
def test_a_fault_of_an_exchange_changes_texts(language, alone, change):
    """The comparisons above can fail."""
    runner = runner_over(
        language, 1, CONFIG, 2, limits=LIMITS, collectives=of_class(change)
    )
    try:
        assert texts(runner) != alone
    except RunnerError as error:
        assert "sampled" in str(error)  # noqa: PT017 - either is how it is found


def test_a_stage_off_by_one_layer_changes_texts(language, alone, monkeypatch):
    whole = Stage.layers

    def shifted(self, total):
        own = whole(self, total)
        return range(own.start + self.index, min(own.stop + self.index, total))

    monkeypatch.setattr(Stage, "layers", shifted)
    found = texts(runner_over(language, 1, CONFIG, 2, limits=LIMITS))
    assert found != alone


def test_lanes_are_on_where_steps_may_be_in_flight():
    assert Stage().limits(LIMITS, 1) is LIMITS
    for depth, lanes, in_flight in ((None, 3, 4), (1, 1, 1), (2, 2, 2), (9, 3, 9)):
        found = Stage(1, 3).limits(replace(LIMITS, decode_steps=8), depth)
        assert (found.stages, found.depth, found.decode_steps) == (lanes, in_flight, 1)


def test_stages_have_as_many_layers_up_to_one():
    for total in range(1, 40):
        for count in range(1, total + 1):
            parts = [[*Stage(index, count).layers(total)] for index in range(count)]
            assert [*itertools.chain(*parts)] == [*range(total)]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
