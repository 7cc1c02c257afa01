"""Speculation changes no output: a tiny model in NumPy, with and without drafts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafted import assert_equal_outputs, outputs, told
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.errors import RequestError
from inl.executor.model_loader import open_model
from inl.runners.startup import worker_options
from inl.spec.cache import Slotted
from inl.speculation.draft_counts import StepTimes
from inl.speculation.drafters import NgramDrafter, SyntheticDrafter
from inl.speculation.setup import check_speculation
from inl.testing.tiny import tiny_llama

VOCAB = 256


@pytest.fixture
def make(engines):
    """Returns a function that makes the two engines to compare."""

    def with_settings(**settings):
        def build(speculates, drafter):
            if not speculates:
                return engines(**settings)
            return engines(
                drafter=drafter, speculation="ngram", adaptive_drafts=False,
                max_drafts=4, **settings,
            )  # fmt: skip

        return build

    return with_settings


@pytest.mark.parametrize("acceptance", [0.6, None], ids=["synthetic", "ngram"])
@pytest.mark.parametrize(
    "settings", [{}, {"token_budget": 7, "depth": 1}, {"max_batch": 1}], ids=str
)
def test_drafts_change_no_output(make, settings, acceptance):
    speculation = assert_equal_outputs(make(**settings), VOCAB, acceptance)
    assert speculation.drafted > speculation.accepted > 5


def test_correct_drafts_save_steps(engines):
    plain = engines(max_batch=1).generate([5, 6, 7], max_tokens=61, ignore_eos=True)
    drafter = SyntheticDrafter({(5, 6, 7): plain.token_ids}, 1.0)
    engine = engines(
        max_batch=1, depth=1, speculation="ngram", max_drafts=4, adaptive_drafts=False,
        drafter=drafter,
    )  # fmt: skip
    assert engine.generate([5, 6, 7], max_tokens=61, ignore_eos=True) == replace(
        plain, first_token_seconds=ANY, seconds=ANY, seed=ANY
    )
    # The prompt gives one token, then twelve steps give five each.
    assert engine.stats.steps == 13
    assert engine.speculation.accepted == engine.speculation.drafted == 48


def test_two_steps_stay_in_flight(engines):
    seen = []
    plain = engines(max_batch=1).generate([5, 6, 7], max_tokens=61, ignore_eos=True)
    drafter = SyntheticDrafter({(5, 6, 7): plain.token_ids}, 0.7)
    engine = engines(
        max_batch=1, depth=2, speculation="ngram", max_drafts=4, adaptive_drafts=False,
        drafter=drafter,
        on_step=lambda record: seen.append(
            (record.bucket.verifies, len(engine.core.scheduler.in_flight))
        ),
    )  # fmt: skip
    found = engine.generate([5, 6, 7], max_tokens=61, ignore_eos=True, temperature=0.0)
    assert found.token_ids == plain.token_ids
    assert seen.count((True, 2)) > 10


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory, tiny_made):
    """Returns a function that writes the tiny model with other weights or sizes."""

    def write(*, noise=0.01, vocab=VOCAB):
        folder = tmp_path_factory.mktemp("draft")
        config, tensors = tiny_made
        if vocab != VOCAB:
            rng = np.random.default_rng(5)
            config, tensors = tiny_llama(rng, vocab=vocab, kv_heads=2)
        rng = np.random.default_rng(1)
        changed = {
            name: (x + noise * rng.standard_normal(x.shape)).astype(np.float32)
            for name, x in tensors.items()
        }
        save_file(changed, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def test_a_draft_model_gives_the_same_outputs(engines, draft_folder):
    plain = outputs(engines(), VOCAB)
    engine = engines(
        speculation="model", draft_model=draft_folder(), adaptive_drafts=False,
        max_drafts=3,
    )  # fmt: skip
    assert told(outputs(engine, VOCAB)) == told(plain)
    counts = engine.speculation
    assert counts.drafted > counts.accepted > 5


@pytest.mark.full
@pytest.mark.parametrize("apart", ["backend", "draft_backend"])
def test_a_target_and_its_draft_model_in_two_processes(
    draft_folder, byte_tokenizer, apart
):
    target = draft_folder(noise=0)

    def opened(**settings):
        config = {"backend": "reference", "dtype": "float32", "context": 128} | settings
        model = open_model(target)
        return InferenceEngine(model, byte_tokenizer, EngineConfig(**config))

    with opened() as engine:
        plain = outputs(engine, VOCAB)
    places = {"draft_backend": "reference", apart: f"worker:{sys.executable}/reference"}
    with opened(
        speculation="model", draft_model=draft_folder(), adaptive_drafts=False,
        max_drafts=3, **places,
    ) as engine:  # fmt: skip
        assert told(outputs(engine, VOCAB)) == told(plain)
        assert engine.speculation.drafted > engine.speculation.accepted > 5


def test_a_draft_model_with_other_tokens_is_refused(engines, draft_folder):
    with pytest.raises(RequestError) as caught:
        engines(speculation="model", draft_model=draft_folder(vocab=300))
    assert "has another tokenizer: a vocabulary of 300" in str(caught.value)


def test_a_draft_model_that_fails_stops_drafting(engines, draft_folder, caplog):
    plain = outputs(engines(), VOCAB)
    engine = engines(
        speculation="model", draft_model=draft_folder(), adaptive_drafts=False,
        max_drafts=3,
    )  # fmt: skip
    engine.speculation.drafter.close()
    assert told(outputs(engine, VOCAB)) == told(plain)
    assert engine.speculation.drafted == 0


def test_adaptive_drafts_measure_the_times_of_steps(engines):
    engine = engines(speculation="ngram", max_drafts=4, max_batch=2)
    times = engine.speculation.times
    assert list(times.seconds) == sorted(times.seconds)
    assert {2, 4, 5}.issubset(times.seconds)
    assert list(times.plain) == [1, 2]
    measured = [*times.seconds.values(), *times.plain.values()]
    assert all(seconds > 0 for seconds in measured)
    assert told(outputs(engine, VOCAB)) == told(outputs(engines(), VOCAB))


def with_state(*state):
    """A model with such state."""
    model = SimpleNamespace(state=lambda _config: state)
    return SimpleNamespace(name="tiny", config=None, model=model)


VELOCITY = Slotted("velocity", (4,), "float32", "replay")
RECURRENT = Slotted("memory", (4,), "float32", "tokens")


@pytest.mark.parametrize(
    ("state", "accepted"),
    [
        ([VELOCITY], 'None, or velocity="reset"$'),
        ([RECURRENT], "None$"),
        ([VELOCITY._replace(restores=("drafts",)), RECURRENT], "None$"),
        ([RECURRENT._replace(restores=("snapshot",))], "None$"),
    ],
)
def test_a_model_whose_state_cannot_go_back_is_refused(state, accepted):
    with pytest.raises(RequestError, match=f"a rejected token; accepted: {accepted}"):
        check_speculation(with_state(*state), EngineConfig(speculation="ngram"))


def test_a_model_whose_state_goes_back_verifies_drafts():
    state = RECURRENT._replace(restores=("snapshot", "drafts"))
    check_speculation(with_state(state), EngineConfig(speculation="ngram"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"speculation": "magic"},
            "found 'magic', accepted: None, auto, ngram, model, eagle or mtp",
        ),
        ({"speculation": "ngram", "max_drafts": -1}, "max_drafts: found -1"),
        ({"speculation": "ngram", "max_drafts": 128}, "None or 1 to 127"),
        ({"speculation": "model"}, "draft_model: found None, accepted: a model with"),
        ({"draft_model": "tiny"}, "draft_model: found 'tiny'"),
        (
            {"speculation": "ngram", "draft_backend": "cpu"},
            "draft_backend: found 'cpu', accepted: None without speculation=",
        ),
        (
            {"speculation": "ngram", "use_kv_cache": False},
            "speculation: found 'ngram', accepted: None with use_kv_cache=False",
        ),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(RequestError) as caught:
        EngineConfig(**settings)
    assert words in str(caught.value)


def test_a_drafter_without_speculation_is_refused(engines):
    with pytest.raises(RequestError, match=r"found one with EngineConfig\.speculation"):
        engines(drafter=NgramDrafter())


@pytest.mark.parametrize("acceptance", [-0.1, 1.1])
def test_an_acceptance_is_a_probability(acceptance):
    with pytest.raises(ValueError, match="accepts 0 to 1"):
        SyntheticDrafter({}, acceptance)


def test_a_worker_gets_the_number_of_drafts_alone(tmp_path):
    config = EngineConfig(
        speculation="model", draft_model=tmp_path, draft_backend="cpu", max_drafts=3,
        adaptive_drafts=False,
    )  # fmt: skip
    checkpoint = SimpleNamespace(path=tmp_path)
    language = SimpleNamespace(checkpoint=checkpoint, quantize=None)
    options = worker_options(language, config, "cpu", None)
    sent = json.loads(json.dumps(options))["config"]
    assert sent == {"max_drafts": 3}
    assert EngineConfig(**sent).draft_limit == 3


class Doubtful(SyntheticDrafter):
    """Predicts four positions right and the next four wrong, with two rates."""

    def propose(self, queries):
        self.wrong = len(queries[0].tokens) // 4 % 2
        (right,) = super().propose(queries)
        return [[token ^ self.wrong for token in right]]

    def rate(self, request):
        return 0.7 + 0.01 * self.wrong


def test_acceptance_is_counted_for_each_rate_of_the_drafter(engines):
    plain = engines(max_batch=1).generate([5, 6, 7], max_tokens=90, ignore_eos=True)
    drafter = Doubtful({(5, 6, 7): plain.token_ids}, 1.0)
    engine = engines(
        max_batch=1, depth=1, speculation="ngram", max_drafts=3, adaptive_drafts=False,
        drafter=drafter,
    )  # fmt: skip
    # A step of 4 tokens costs two of 1: drafts that are half right would not pay off.
    engine.speculation.times = StepTimes({2: 1.5, 4: 2.0}, {1: 1.0})
    found = engine.generate([5, 6, 7], max_tokens=90, ignore_eos=True)
    assert found.token_ids == plain.token_ids
    assert engine.speculation.accepted > 25
    assert engine.speculation.accepted > 0.8 * engine.speculation.drafted


class Timed(SyntheticDrafter):
    """Right about every token; counts the sequences that it was asked about."""

    def __init__(self, outputs, *, each, prompt):
        super().__init__(outputs, 1.0)
        self.each, self.prompt, self.asked = each, prompt, 0

    def seconds(self, rows, drafts):
        return self.each * rows * drafts

    def prompt_seconds(self, tokens):
        return self.prompt * tokens

    def propose(self, queries):
        self.asked += len(queries)
        return super().propose(queries)


@pytest.mark.parametrize(
    ("each", "prompt", "tokens", "is_asked"),
    [
        (0.0, 0.0, 60, True),
        # One token for each second without drafts. With 3, at the assumed acceptance,
        # 2.5 in 2 seconds and their own time.
        (0.1, 0.0, 60, True),
        (0.2, 0.0, 60, False),
        # 0.2 seconds are saved for each token.
        (0.0, 3.0, 60, True),
        (0.0, 3.0, 30, False),
    ],
)
def test_a_drafter_with_known_times_is_asked_only_if_it_pays_off(
    engines, each, prompt, tokens, is_asked
):
    options = {"max_tokens": tokens, "ignore_eos": True}
    plain = engines(max_batch=1).generate([5, 6, 7], **options)
    drafter = Timed({(5, 6, 7): plain.token_ids}, each=each, prompt=prompt)
    engine = engines(
        max_batch=1, depth=1, speculation="ngram", max_drafts=3, adaptive_drafts=False,
        drafter=drafter,
    )  # fmt: skip
    engine.speculation.times = StepTimes({2: 1.5, 4: 2.0}, {1: 1.0})
    assert engine.generate([5, 6, 7], **options).token_ids == plain.token_ids
    assert bool(drafter.asked) == is_asked
    assert bool(engine.speculation.accepted) == is_asked
