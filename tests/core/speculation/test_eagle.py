"""EAGLE-3 draft heads on the reference backend, against a plain float64 model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from drafted import long_guide, outputs, told
from eagle_heads import (
    PLAIN_REQUESTS,
    VOCAB,
    PlainHead,
    fitted,
    proposals,
    random_head,
    written,
)
from inl import EngineConfig, InferenceEngine
from inl.backend.programs import info_of
from inl.engine.core import EngineCore
from inl.errors import ModelError, RequestError
from inl.executor.model_loader import LanguageModel
from inl.kv.block_pool import BlockPool
from inl.kv.kv_cache_manager import KVCacheManager
from inl.models.llama import MODEL
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.speculation.setup import make_speculation
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

PREFIX = [int(x) for x in np.random.default_rng(2).integers(0, VOCAB, 34)]
"""More than two blocks."""
OTHER_ENDS = [[*PREFIX[:32], 9 * at, 8] for at in range(1, 7)]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2, layers=3)


@pytest.fixture(scope="module")
def head(target):
    return random_head(np.random.default_rng(8), target[0], draft_vocab=64)


@pytest.fixture
def make(target, tmp_path):
    """Makes engines on the tiny model, with or without a head, and closes them."""
    made = []

    def build(head=None, **settings):
        if head is not None:
            folder = written(tmp_path / f"head{len(made)}", *head)
            settings = {
                "speculation": "eagle", "draft_model": folder, "max_drafts": 3,
                "adaptive_drafts": False, "dtype": "float64",
            } | settings  # fmt: skip
        defaults = {"backend": "reference", "max_batch": 4, "context": 96}
        config = EngineConfig(**defaults | {"dtype": "float64"} | settings)
        checkpoint = MemoryCheckpoint(*target)
        language = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
        made.append(InferenceEngine(language, None, config))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def assert_plain(target, head, seen, least, every=1):
    """Compare recorded drafts with those of the plain model."""
    model = PlainHead(target, head)
    assert len(seen) >= least
    for text, answer in seen[::every]:
        assert answer == model.drafts(text, len(answer)), f"after {len(text)} tokens"


def run(engine, prompts, **options):
    """The token ids of each prompt's output."""
    done = engine.generate(prompts, ignore_eos=True, **options)
    return [each.token_ids for each in done]


@pytest.mark.parametrize(
    "settings",
    [
        # Blocks for two of four sequences, in chunks.
        {"cache_bytes": 6 * 16 * 8 * 2 * 2 * 8 * 3 + 1, "token_budget": 7},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"max_batch": 1}, marks=pytest.mark.full),
    ],
    ids=["preempted", "batched", "one by one"],
)
def test_outputs_and_drafts_are_those_of_plain_models(make, target, head, settings):
    plain = told(outputs(make(**settings), VOCAB, PLAIN_REQUESTS))
    engine = make(head, **settings)
    seen = proposals(engine)
    assert told(outputs(engine, VOCAB, PLAIN_REQUESTS)) == plain
    assert bool(engine.stats.preemptions) == ("cache_bytes" in settings)
    assert_plain(target, head, seen, 50, every=9)


def after_prefix_hit(engine):
    """The drafts for prompts that share two blocks with one of another end."""
    run(engine, [[*PREFIX[:32], 5, 6]], max_tokens=3)
    seen = proposals(engine)
    return run(engine, OTHER_ENDS, max_tokens=8), seen


def test_a_prefix_hit_leaves_the_block_to_compute_again(make, target, head):
    engine = make(head)
    found, seen = after_prefix_hit(engine)
    assert engine.stats.prefix_hit_tokens == 16 * len(OTHER_ENDS)
    assert found == run(make(), OTHER_ENDS, max_tokens=8)
    assert_plain(target, head, seen, 20)


def test_drafts_after_sharing_the_last_block_differ(make, target, head, monkeypatch):
    admit = KVCacheManager.admit

    def forgetful(self, *args, recomputes_block, **options):
        return admit(self, *args, **options)

    monkeypatch.setattr(KVCacheManager, "admit", forgetful)
    engine = make(head)
    _, seen = after_prefix_hit(engine)
    assert engine.stats.prefix_hit_tokens == 32 * len(OTHER_ENDS)
    with pytest.raises(AssertionError, match=r"after [34][0-9] tokens"):
        assert_plain(target, head, seen, 20)


def test_only_the_last_shared_block_is_computed_again():
    kv_cache = KVCacheManager([BlockPool(9, 16)])
    keys = [b"a", b"b", b"c"]
    table, hits = kv_cache.admit(keys, 4, spare=0, recomputes_block=True)
    assert hits == 0
    for index, key in enumerate(keys):
        kv_cache.publish(table, index, key)
    other, hits = kv_cache.admit(keys, 4, spare=0, recomputes_block=True)
    assert (hits, other[0][:2]) == (2, table[0][:2])
    assert other[0][2] != table[0][2]


def test_a_sequence_with_a_grammar_is_drafted(make, target, head):
    def texts(engine):
        requests = [
            Request(PREFIX[:5], max_tokens=12, guide=long_guide(7, VOCAB)),
            Request(PREFIX[5:12], max_tokens=12, temperature=0.8, seed=3),
        ]
        for request in requests:
            engine.core.add(request)
        while engine.core.has_work:
            engine.core.step()
        assert all(each.error is None for each in requests)
        return [each.output_ids for each in requests]

    engine = make(head)
    seen = proposals(engine)
    assert texts(engine) == texts(make())
    assert {text[:5] for text, _ in seen} == {tuple(PREFIX[:5]), tuple(PREFIX[5:10])}
    assert_plain(target, head, seen, 5)


@pytest.mark.parametrize("shift", [0, 1, pytest.param(-1, marks=pytest.mark.full)])
def test_a_fitted_head_is_accepted_only_with_aligned_taps(make, target, shift):
    rng = np.random.default_rng(3)
    prompts = [[int(x) for x in rng.integers(0, VOCAB, 9)] for _ in range(3)]
    plain = run(make(), prompts, max_tokens=30)
    head = random_head(np.random.default_rng(8), target[0])
    pairs = [(prompt, list(ids)) for prompt, ids in zip(prompts, plain, strict=True)]
    engine = make(fitted(target, head, pairs, 2))
    executor = engine.speculation.drafter._executor
    draft = executor.draft

    def shifted(bucket, frame, rows, source, *, is_tapped):
        # A planted fault: the hidden states of the neighbors.
        source = np.roll(source, shift, axis=0) if is_tapped else source
        return draft(bucket, frame, rows, source, is_tapped=is_tapped)

    executor.draft = shifted
    assert run(engine, prompts, max_tokens=30) == plain
    counts = engine.speculation
    share = counts.accepted_at[0] / counts.rows
    # Chance is one of 96 tokens.
    assert share > 0.5 if shift == 0 else share < 0.35


def test_other_names_and_shared_parts(make, target):
    config, tensors = random_head(np.random.default_rng(8), target[0])
    theirs = {"lm_head.weight": target[1]["lm_head.weight"]}
    renamed = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if name != "lm_head.weight"
    }
    engine = make((config, renamed))
    seen = proposals(engine)
    run(engine, [PREFIX[:7]], max_tokens=8)
    assert_plain(target, (config, tensors | theirs), seen, 5)


WRONG = [
    ({"hidden_size": 40}, {}, "config field 'hidden_size': found 40, accepted: 48"),
    ({"vocab_size": 97}, {}, "config field 'vocab_size': found 97, accepted: 96"),
    (
        {"eagle_config": {}}, {},
        "config field 'eagle_aux_hidden_state_layer_ids': found [2, 1, 0], expected "
        "ascending layers of the target, 0 to 2",
    ),
    (
        {"eagle_aux_hidden_state_layer_ids": [0, 1]}, {},
        "tensor 'fc.weight': found 144 columns, accepted: 96, for 2 layers of 48",
    ),
    ({"num_hidden_layers": 2}, {}, "'num_hidden_layers': found 2, accepted: 1"),
    ({}, {"fc.weight": None}, "tensor 'fc.weight': not found among 14; accepted"),
    ({}, {"d2t": None}, "tensor 'd2t': not found, needed for a draft vocabulary of 64"),
    ({}, {"d2t": np.full(64, 90)}, "tensor 'd2t': found token 96, accepted: 0 to 95"),
    ({}, {"d2t": np.zeros(3, int)}, "tensor 'd2t': found int64 [3], accepted: integ"),
    ({}, {"lm_head.weight": None}, "'draft_vocab_size': found 64 without lm_head.wei"),
    ({}, {"norm.weight": None}, "missing norm.weight [48]"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "changes", "sentence"), WRONG)
def test_a_head_that_does_not_fit_is_refused(make, head, fields, changes, sentence):
    tensors = {**head[1], **changes}
    kept = {name: x for name, x in tensors.items() if x is not None}
    with pytest.raises(ModelError) as caught:
        make((head[0] | fields, kept))
    assert sentence in str(caught.value)
    assert "head0" in str(caught.value)


def test_settings_that_do_not_fit_are_refused(make, target, head, tmp_path):
    folder = written(tmp_path / "head", *head)
    for settings, sentence in (
        ({"draft_model": None}, "EngineConfig.draft_model: found None"),
        ({"tensor_parallel": 2}, "EngineConfig.tensor_parallel: found 2, accepted: 1"),
        ({"draft_backend": "cpu"}, "EngineConfig.draft_backend: found 'cpu'"),
    ):
        with pytest.raises(RequestError) as caught:
            EngineConfig(**{"speculation": "eagle", "draft_model": folder} | settings)
        assert sentence in str(caught.value)
    config = EngineConfig(
        speculation="eagle", draft_model=folder, max_drafts=3, adaptive_drafts=False
    )
    checkpoint = MemoryCheckpoint(*target)
    language = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    engine = make()
    remote = SimpleNamespace(limits=engine.runner.limits)
    with pytest.raises(RequestError, match="found 'eagle' on auto, where hidden"):
        make_speculation(
            language, config, remote, engine.core.scheduler.config, new_core=EngineCore
        )
    assert isinstance(remote.limits, Limits)


def test_a_head_that_fails_stops_drafting(make, head, caplog):
    engine = make(head)
    engine.speculation.drafter.close()
    prompts = [PREFIX[:5], PREFIX[5:9]]
    found = run(engine, prompts, max_tokens=8)
    assert found == run(make(), prompts, max_tokens=8)
    assert engine.speculation.drafted == 0


def test_the_config_is_read_from_the_folder(make, head, tmp_path):
    engine = make(head)
    assert engine.model.taps == (0, 1, 2)
    stored = json.loads((tmp_path / "head0" / "config.json").read_text())
    assert stored["architectures"] == ["LlamaForCausalLMEagle3"]


def test_an_interrupted_head_is_reset(make, target, head):
    engine = make(head)
    executor = engine.speculation.drafter._executor
    program = executor._program

    def interrupted(*_):
        def stop(*_):
            raise KeyboardInterrupt

        executor._program = program
        return stop

    plain = run(make(), [PREFIX[:9]], max_tokens=8)
    executor._program = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(engine, [PREFIX[:5]], max_tokens=4)
    seen = proposals(engine)
    assert run(engine, [PREFIX[:9]], max_tokens=8) == plain
    assert_plain(target, head, seen, 4)


def test_the_program_of_a_head_consumes_its_state(make):
    info = info_of("draft", None, make().runner.limits)
    assert (info.consumes, info.bucket) == ((3,), None)
