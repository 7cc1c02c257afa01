"""InferenceEngine on a tiny model and the NumPy reference."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from inl import Completion, Device, DeviceType, EngineConfig, InferenceEngine
from inl.errors import (
    BackendNotFound,
    BackendUnavailable,
    CheckpointError,
    OutOfMemory,
    PromptTooLong,
    RequestError,
    RunnerError,
)
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama
from inl.text.detokenize import Detokenizer

VOCAB = 256


@pytest.fixture(scope="module")
def made():
    return tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2)


@pytest.fixture
def make(made, byte_tokenizer):
    engines = []

    def build(*, on_step=None, eos=(), tensors=None, **settings):
        checkpoint = MemoryCheckpoint(made[0], tensors or made[1])
        checkpoint.eos_token_ids = tuple(eos)
        config = MODEL.config(checkpoint.config)
        settings = {"backend": "reference", "max_batch": 4, "context": 96} | settings
        engine = InferenceEngine(
            LanguageModel(MODEL, config, checkpoint),
            byte_tokenizer,
            EngineConfig(**settings),
            on_step=on_step,
        )
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def greedy(made, prompt, count):
    """The greedy output of an independent, uncached float64 implementation."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(plain_logits(*made, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


def test_a_string_gives_a_completion(make, made):
    engine = make()
    found = engine.generate("hello", max_tokens=9)
    assert isinstance(found, Completion)
    assert found.token_ids == greedy(made, engine.tokenizer.encode("hello"), 9)
    assert str(found) == found.text == engine.tokenizer.decode(found.token_ids)
    assert (found.finish_reason, found.prompt_tokens) == ("length", 5)
    assert 0 < found.first_token_seconds <= found.seconds


def test_prompts_as_ids_and_as_lists(make, made):
    steps = []
    engine = make(on_step=steps.append)
    prompts = [[1, 2, 3], [9] * 30, [200], [7, 7]]
    found = engine.generate(prompts, max_tokens=12)
    assert [answer.token_ids for answer in found] == [
        greedy(made, prompt, 12) for prompt in prompts
    ]
    assert max(step.rows for step in steps) == 4
    assert engine.generate([1, 2, 3], max_tokens=12).token_ids == found[0].token_ids
    texts = engine.generate(["a", "b"], max_tokens=2)
    assert [len(answer.token_ids) for answer in texts] == [2, 2]


def test_stream_gives_the_same_text(make):
    engine = make()
    whole = engine.generate("stream me", max_tokens=40, temperature=1.5, seed=3).text
    assert (
        "".join(engine.stream("stream me", max_tokens=40, temperature=1.5, seed=3))
        == whole
    )


def test_only_whole_characters_are_streamed(make):
    engine = make()
    pieces = list(engine.stream("x", max_tokens=60, temperature=3.0, seed=11))
    whole = engine.generate("x", max_tokens=60, temperature=3.0, seed=11)
    assert "".join(pieces) == whole.text
    assert any(index >= 128 for index in whole.token_ids), "no multibyte attempt"


def test_stop_strings_end_the_text_and_are_not_shown(make):
    engine = make()
    free = engine.generate("stop", max_tokens=40, temperature=1.0, seed=1).text
    stop = free[7:10]
    at = free.index(stop)
    for options in ({"stop": stop}, {"stop": ["never seen", stop]}):
        found = engine.generate(
            "stop", max_tokens=40, temperature=1.0, seed=1, **options
        )
        assert (found.text, found.finish_reason) == (free[:at], "stop")
    streamed = engine.stream("stop", max_tokens=40, temperature=1.0, seed=1, stop=stop)
    assert "".join(streamed) == free[:at]
    assert engine.generate("stop", max_tokens=4, stop=free + "!").text


def test_outputs_are_decoded_while_others_are_computed(make, monkeypatch):
    engine, steps, extend = make(), [], Detokenizer.extend

    def noted(self, ids):
        steps.append(engine.stats.steps)
        return extend(self, ids)

    monkeypatch.setattr(Detokenizer, "extend", noted)
    # Three wait for a row of the batch of four until another output is complete.
    engine.generate([[number] for number in range(7)], max_tokens=20)
    assert len(steps) == 7
    assert steps[3] < steps[4]


def test_end_tokens_and_ignore_eos(make, made):
    answer = greedy(made, [5, 6], 10)
    end = answer[4]
    stopped = answer.index(end) + 1
    engine = make(eos=[end])
    found = engine.generate([5, 6], max_tokens=10)
    assert (found.token_ids, found.finish_reason) == (answer[:stopped], "stop")
    assert found.text == engine.tokenizer.decode(answer[: stopped - 1])
    going = engine.generate([5, 6], max_tokens=10, ignore_eos=True)
    assert (going.token_ids, going.finish_reason) == (answer, "length")


def test_seeds(make):
    engine = make()
    draws = {
        seed: engine.generate("s", max_tokens=16, temperature=1.0, seed=seed).token_ids
        for seed in (1, 2, 3)
    }
    assert len(set(draws.values())) == 3
    assert (
        engine.generate("s", max_tokens=16, temperature=1.0, seed=2).token_ids
        == (draws[2])
    )
    cold = engine.generate("s", max_tokens=16, temperature=0.0, seed=9).token_ids
    assert cold == engine.generate("s", max_tokens=16).token_ids


def test_a_seed_that_is_not_given_is_random_and_reported(make):
    engine = make()
    options = {"max_tokens": 12, "temperature": 1.0}
    completions = engine.generate([[5, 6, 7]] * 18, **options)
    assert len({each.text for each in completions}) == 18
    assert len({each.seed for each in completions}) == 18
    for each in completions[:3]:
        assert 0 <= each.seed < 2**63
        again = engine.generate([5, 6, 7], seed=each.seed, **options)
        assert (again.token_ids, again.seed) == (each.token_ids, each.seed)
    drawn = engine.generate([[5, 6, 7]] * 2, seed=None, **options)
    assert drawn[0].token_ids != drawn[1].token_ids


def test_blocks_are_shared_only_between_equal_cache_salts(make):
    engine = make()
    prompt = list(range(40))

    def cached(**options):
        return engine.generate(prompt, max_tokens=1, **options).cached_tokens

    assert [cached(), cached(), cached(cache_salt=None)] == [0, 32, 32]
    assert [cached(cache_salt="a"), cached(cache_salt="a")] == [0, 32]
    assert [cached(cache_salt="b"), cached(cache_salt="a"), cached()] == [0, 32, 32]


def test_prefix_keys_depend_on_the_models_weights(make, made):
    _, tensors = made
    digests = {
        make(tensors=each).core.scheduler.config.model_digest
        for each in (tensors, tensors, {k: v * 2 for k, v in tensors.items()})
    }
    assert len(digests) == 2
    assert "" not in digests


class TestWithoutTokenizer:
    @pytest.fixture
    def engine(self, made, tmp_path):
        config, tensors = made
        (tmp_path / "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        settings = EngineConfig(backend="reference", context=96)
        with InferenceEngine.from_pretrained(tmp_path, settings) as engine:
            yield engine

    def test_token_ids_are_served(self, engine, made):
        completion = engine.generate([5, 6, 7], max_tokens=8)
        assert completion.token_ids == greedy(made, [5, 6, 7], 8)
        assert completion.text == ""
        assert list(engine.stream([5, 6, 7], max_tokens=8)) == []

    @pytest.mark.parametrize(
        ("prompt", "options", "words"),
        [
            ("text", {}, r"prompt: the model has no tokenizer \(.*tokenizer\.json"),
            ([5], {"stop": "end"}, "stop: the model has no tokenizer .*pass token ids"),
        ],
    )
    def test_text_is_refused(self, engine, prompt, options, words):
        with pytest.raises(RequestError, match=words):
            engine.generate(prompt, **options)

    def test_chat_and_the_tokenizer_itself_are_refused(self, engine):
        with pytest.raises(RequestError, match="chat: the model has no tokenizer"):
            engine.chat_ids("hello")
        with pytest.raises(RequestError, match="the model has no tokenizer"):
            _ = engine.tokenizer


def test_a_damaged_tokenizer_is_not_a_missing_one(made, tmp_path):
    config, tensors = made
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        InferenceEngine.from_pretrained(tmp_path, EngineConfig(backend="reference"))


def test_a_seed_gives_the_same_tokens_in_any_batch(make):
    engine = make()
    alone = engine.generate([4, 4], max_tokens=10, temperature=1.0, seed=0).token_ids
    crowd = engine.generate(
        [[9, 8], [4, 4], [1] * 20], max_tokens=10, temperature=1.0, seed=0
    )
    assert crowd[1].token_ids == alone


def test_without_cache_every_step_computes_the_whole_sequence(make, made):
    steps = []
    engine = make(use_kv_cache=False, on_step=steps.append)
    found = engine.generate([3, 1, 4, 1, 5], max_tokens=6)
    assert found.token_ids == greedy(made, [3, 1, 4, 1, 5], 6)
    assert [step.tokens for step in steps] == [5, 6, 7, 8, 9, 10]
    cached = []
    make(on_step=cached.append).generate([3, 1, 4, 1, 5], max_tokens=6)
    assert [step.tokens for step in cached] == [5, 1, 1, 1, 1, 1]


def test_chunked_prefill_does_not_change_the_output(make, made):
    prompt = [int(i) for i in np.random.default_rng(2).integers(0, VOCAB, 70)]
    engine = make(token_budget=16)
    assert engine.generate(prompt, max_tokens=8).token_ids == greedy(made, prompt, 8)
    again = engine.generate(prompt, max_tokens=8)
    assert again.cached_tokens >= 48
    assert again.token_ids == greedy(made, prompt, 8)


def test_closing_a_stream_frees_its_blocks(make, drained):
    engine = make(max_batch=1)
    for _ in range(3):
        stream = engine.stream("x" * 60, max_tokens=30)
        next(stream)
        stream.close()
    unread = engine.stream("y" * 60, max_tokens=30)
    del unread
    assert len(engine.generate("z" * 60, max_tokens=30).token_ids) == 30
    assert drained(engine)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ("", {}, RequestError, ["''", "at least one"]),
        ([], {}, RequestError, ["[]", "at least one"]),
        ([[1], []], {}, RequestError, ["[]", "at least one"]),
        ([1, 256], {}, RequestError, ["prompt[1]", "256", "0 to 255"]),
        ([1, -1], {}, RequestError, ["prompt[1]", "-1", "0 to 255"]),
        ([1.5], {}, RequestError, ["1.5", "token ids"]),
        (None, {}, RequestError, ["None", "a string"]),
        (["a", 3], {}, RequestError, ["prompt[0]"]),
        ([1] * 97, {}, PromptTooLong, ["97", "96"]),
        ("x", {"max_tokens": -1}, RequestError, ["max_tokens", "-1", "0 and above"]),
        ("x", {"temperature": -1}, RequestError, ["temperature", "-1"]),
        ("x", {"temperature": float("nan")}, RequestError, ["temperature", "nan"]),
        ("x", {"stop": ""}, RequestError, ["stop", "''"]),
        ("x", {"stop": [1]}, RequestError, ["stop", "1"]),
        ("x", {"stop": 5}, RequestError, ["stop", "5", "a list of strings"]),
        ("x", {"stop": b"end"}, RequestError, ["stop", "b'end'"]),
        ("x", {"stop": {"end": 1}}, RequestError, ["stop", "{'end': 1}"]),
        ("x", {"stop": iter(["end"])}, RequestError, ["stop", "list_iterator"]),
        (b"x", {}, RequestError, ["b'x'", "a string"]),
        ({"x": 1}, {}, RequestError, ["{'x': 1}", "a string"]),
        ("x", {"seed": "s"}, RequestError, ["seed", "'s'"]),
    ],
)
def test_a_bad_request_is_refused_and_loses_nothing(
    make, drained, prompt, options, error, words
):
    engine = make()
    before = engine.generate("fine", max_tokens=4)
    with pytest.raises(error) as caught:
        engine.generate(prompt, **options)
    for word in words:
        assert word in str(caught.value)
    assert drained(engine)
    assert engine.generate("fine", max_tokens=4).token_ids == before.token_ids


def test_one_bad_prompt_of_several_refuses_all(make):
    steps = []
    engine = make(on_step=steps.append)
    with pytest.raises(PromptTooLong):
        engine.generate([[1], [2] * 500], max_tokens=3)
    assert not steps


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float8"}, ["dtype", "'float8'", "float32"]),
        ({"max_batch": 0}, ["max_batch", "0"]),
        ({"use_kv_cache": 1}, ["use_kv_cache", "1", "True or False"]),
        ({"context": -5}, ["context", "-5"]),
        ({"token_budget": 2.5}, ["token_budget", "2.5"]),
    ],
)
def test_bad_settings_are_refused(make, settings, words):
    with pytest.raises(RequestError) as caught:
        make(**settings)
    for word in words:
        assert word in str(caught.value)


def test_a_cache_that_is_too_small_is_refused(make):
    with pytest.raises(OutOfMemory, match="1,000 are allowed"):
        make(cache_bytes=1000)


def test_a_named_device_has_no_fallback(make):
    # The plugin is not installed, or it is and finds no such device.
    with pytest.raises((BackendNotFound, BackendUnavailable), match="rocm"):
        make(backend="rocm")


def test_devices_are_accepted_as_values(make):
    engine = make(backend=Device(DeviceType.REFERENCE))
    assert engine.device == "reference:0"


def test_a_failed_step_ends_its_completions(make, monkeypatch):
    engine = make()
    wanted = engine.generate("c", max_tokens=4).token_ids

    def fail():
        raise OSError("the wire is cut")

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "collect", fail)
        for _ in range(3):
            with pytest.raises(RunnerError, match="the wire is cut"):
                engine.generate(["a", "b"], max_tokens=4)
    assert engine.core.failed_steps == 3
    assert engine.generate("c", max_tokens=4).token_ids == wanted


def test_invariant_mode_refuses_and_names_the_op(make):
    from inl.errors import NoKernel

    with pytest.raises(NoKernel, match="not batch-invariant"):
        make(invariant=True)
