"""Prompts with embeddings: the table's own rows give the same tokens as its ids."""

from __future__ import annotations

import json
import sys
from random import Random

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl import EngineConfig, InferenceEngine
from inl.dtypes import cast, widen
from inl.engine.core import EngineCore
from inl.engine.prompt_embeddings import PromptEmbeddings
from inl.errors import ProtocolError, RequestError
from inl.executor.model_loader import open_model
from inl.protocol.runner import Limits
from inl.recording.replay import replay
from inl.recording.trace_file import read_trace
from inl.runners.startup import start
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.embedded_rows import read_inputs, with_rows
from inl.spec.message import HEADER_WORD
from inl.testing.hash_runner import HashRunner
from inl.testing.play import admission, one_step
from inl.testing.tiny import tiny_llama

HF, TENSORS = tiny_llama(np.random.default_rng(7))
TABLE = TENSORS["model.embed_tokens.weight"]
IDS = [int(x) for x in np.random.default_rng(1).integers(0, 96, 40)]
MIXED = [*IDS[:3], TABLE[IDS[3:20]], *IDS[20:22], TABLE[IDS[22:38]], *IDS[38:]]
COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(HF))
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    with opened(folder) as engine:
        return engine.generate(IDS, max_tokens=COUNT).token_ids


def opened(folder, **settings):
    fields = {"backend": "reference", "dtype": "float32", "context": 80} | settings
    return InferenceEngine(open_model(folder), config=EngineConfig(**fields))


PLACES = {
    "here": {},
    "chunked": {"token_budget": 7},
    "without a cache": {"use_kv_cache": False},
    "in a worker": {"backend": f"worker:{sys.executable}/reference"},
    "with adapters": {"max_adapters": 1, "max_adapter_rank": 2},
    "speculating": {"speculation": "ngram", "adaptive_drafts": False},
    "cpu": {"backend": "cpu"},
}


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_the_table_give_the_tokens_of_its_ids(folder, expected, place):
    if place == "cpu":
        pytest.importorskip("inl_cpu")
    with opened(folder, **PLACES[place]) as engine:
        cold = engine.generate(MIXED, max_tokens=COUNT)
        assert (cold.token_ids, cold.prompt_tokens) == (expected, len(IDS))
        hits = engine.stats.prefix_hit_tokens
        assert engine.generate(MIXED, max_tokens=COUNT).token_ids == expected
        if engine.config.use_kv_cache:
            assert engine.stats.prefix_hit_tokens >= hits + 32
        prompts = [MIXED, IDS, [TABLE[IDS]], [*IDS[:39], TABLE[IDS[39:]]]]
        for answer in engine.generate(prompts, max_tokens=COUNT):
            assert answer.token_ids == expected
        assert engine.generate(TABLE[IDS], max_tokens=COUNT).token_ids == expected


def test_other_rows_share_no_prefix_and_give_other_tokens(folder, expected):
    other = TABLE[IDS].copy()
    other[0] += 0.5
    with opened(folder) as engine:
        engine.generate([TABLE[IDS]], max_tokens=COUNT)
        hits = engine.stats.prefix_hit_tokens
        found = engine.generate([other], max_tokens=COUNT)
        assert engine.stats.prefix_hit_tokens == hits
        assert found.token_ids != expected
        again = engine.generate([other], max_tokens=COUNT)
        assert engine.stats.prefix_hit_tokens == hits + 32
        assert again.token_ids == found.token_ids


def test_a_preempted_prompt_is_computed_again_from_its_rows(folder, expected):
    language = open_model(folder)
    config = EngineConfig(backend="reference", dtype="float32", context=80)
    runner = start(language, config).runner
    core = EngineCore(runner, SchedulerConfig(prefix_cache=False))
    spans = {3: MIXED[3], 22: MIXED[6]}
    embeddings = PromptEmbeddings(spans, len(IDS))
    request = Request(IDS, max_tokens=COUNT, embeddings=embeddings)
    core.add(request)
    for _ in range(3):
        core.step()
    core.scheduler.preempt(request)
    while core.has_work:
        core.step()
    assert core.stats.preemptions == 1
    assert tuple(request.output_ids) == expected
    runner.close()


def test_a_trace_with_embeddings_is_replayed(folder, tmp_path):
    path = tmp_path / "a.trace"
    with opened(folder, trace=path, token_budget=16) as engine:
        engine.generate([MIXED, IDS], max_tokens=COUNT)
    config = EngineConfig(backend="reference", dtype="float32")
    language = open_model(folder)
    outcome = replay(
        read_trace(path), lambda n: start(language, config, limits=n).runner
    )
    assert outcome.differences == []
    assert outcome.skipped == 0


def test_steps_without_embeddings_use_the_same_programs_as_before(folder):
    with opened(folder) as engine:
        engine.generate(IDS, max_tokens=COUNT)
        executor = engine.runner.executor
        names = {name for name, _ in executor.program_keys}
        assert names == {"advance"}
        engine.generate(MIXED, max_tokens=COUNT)
        keys = executor.program_keys
        embedded = [bucket.tokens for name, bucket in keys if name != "advance"]
        assert embedded == [40], "one step had embeddings"


def test_hash_runner_depends_on_every_row_and_on_its_position():
    limits = Limits(4, (40,), 4, 8, 997, embedding=3)
    random, texts = Random(0), set()
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)

    def answer(spans, budget=64):
        core = EngineCore(
            HashRunner(limits, lag=random), SchedulerConfig(token_budget=budget)
        )
        embeddings = PromptEmbeddings(spans, 11) if spans else None
        request = Request([0] * 11, max_tokens=5, embeddings=embeddings)
        for _ in range(2):  # cold and warm
            core.add(request)
            while core.has_work:
                core.step()
            texts.add(tuple(request.output_ids))
            again = Request([0] * 11, max_tokens=5, embeddings=embeddings)
            found, request = request, again
        return tuple(found.output_ids)

    first = answer({2: rows})
    for budget in (1, 2, 3, 5):
        assert answer({2: rows}, budget) == first
    changed = [
        {3: rows},
        {2: rows[:3]},
        {2: rows[::-1]},
        {},
        {2: rows[:2], 6: rows[2:]},
    ]
    assert len({first, *map(answer, changed)}) == 6
    assert len(texts) == 6, "warm equals cold"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, TABLE[:2, :5]], "found embeddings of 5, this model accepts rows of 48"),
        ([1, np.full((2, 48), np.nan)], r"prompt\[1\]: found NaN or infinity"),
        ([1, np.zeros((0, 48))], r"prompt\[1\]: found shape \[0, 48\]"),
        (
            [TABLE[:2], TABLE[:2, :7]],
            "embeddings at 2: found rows of 7, others have 48",
        ),
        ([TABLE[IDS], TABLE[IDS]], "found 80 tokens, accepts at most 79"),
        ([1, np.array([["a"]])], r"prompt\[1\]: could not convert"),
    ],
)
def test_bad_rows_are_refused_by_name(folder, prompt, message):
    with opened(folder) as engine, pytest.raises(RequestError, match=message):
        engine.generate(prompt, max_tokens=1)


def test_log_probabilities_of_embeddings_are_refused(folder):
    refused = pytest.raises(RequestError, match="with embeddings in the prompt")
    with opened(folder) as engine, refused:
        engine.generate(MIXED, max_tokens=1, prompt_logprobs=1)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({-1: TABLE[:1]}, "1 rows at -1"),
        ({2: TABLE[:2]}, "2 rows at 2, accepts .* of 3 tokens"),
        ({0: TABLE[:2], 1: TABLE[:1]}, "overlap"),
    ],
)
def test_spans_outside_of_the_prompt_are_refused(spans, message):
    with pytest.raises(RequestError, match=message):
        PromptEmbeddings(spans, 3)


@pytest.mark.parametrize("make", [HashRunner, None])
@pytest.mark.parametrize(
    ("rows", "cut", "message"),
    [
        ({2: TABLE[0]}, 0, "indices"),  # the step has two tokens
        ({0: TABLE[0]}, 1, "words, accepts a multiple of 49"),
        ({0: np.full(48, np.inf, np.float32)}, 0, "found inf or nan"),
        ({1: TABLE[0]}, 49, "found 0 words"),
    ],
)
def test_damaged_frames_are_refused(folder, make, rows, cut, message):
    config = EngineConfig(backend="reference", dtype="float32", context=32)
    runner = start(open_model(folder), config).runner
    if make is not None:
        runner = make(runner.limits)
    runner.submit(admission(runner.limits, 1, [1]))
    frame = one_step(runner.limits, [(1, [5, 6])], step=1, decoding=0)
    frame = with_rows(frame, rows, runner.limits)
    with pytest.raises(ProtocolError, match=message):
        runner.submit(frame[: len(frame) - cut])
    runner.close()


def of_16_bits(rows):
    """Round to numbers of bfloat16, toward zero."""
    return (rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def limits_of(width):
    return Limits(
        slots=2, blocks=(2,), block_size=4, max_blocks_per_seq=2, vocab=50,
        embedding=width,
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 5, 48])
def test_embeddings_of_16_bits_take_half_a_frame(width):
    rng = np.random.default_rng(width)
    exact = {at: rng.standard_normal(width).astype(np.float32) for at in (1, 4, 5)}
    rounded = {at: of_16_bits(row) for at, row in exact.items()}
    frame, limits = np.zeros(40, np.int32), limits_of(width)
    for rows, words in ((exact, width), (rounded, (width + 1) // 2)):
        whole = with_rows(frame, rows, limits)
        assert len(whole) == 40 + 3 * (1 + words)
        found = read_inputs(whole, 40, 6, limits)
        assert found.indices.tolist() == [1, 4, 5]
        assert widen(found.rows).tobytes() == np.stack(list(rows.values())).tobytes()
    bits = {at: cast(row, "bfloat16").data for at, row in rounded.items()}
    assert (with_rows(frame, bits, limits) == whole).all()
    mixed = with_rows(frame, {**exact, 1: bits[1]}, limits)
    assert (mixed == with_rows(frame, {**exact, 1: rounded[1]}, limits)).all()
    with pytest.raises(ProtocolError, match="accepts a multiple of"):
        read_inputs(np.append(whole, np.int32(0)), 40, 6, limits_of(width + 2))


def test_embeddings_of_16_bits_give_the_tokens_of_ids(tmp_path):
    name = "model.embed_tokens.weight"
    table = of_16_bits(TABLE)
    (tmp_path / "config.json").write_text(json.dumps(HF))
    save_file(TENSORS | {name: table}, tmp_path / "model.safetensors")
    with opened(tmp_path) as engine:
        expected = engine.generate(IDS, max_tokens=COUNT).token_ids
        mixed = [*IDS[:3], table[IDS[3:20]], *IDS[20:]]
        assert engine.generate(mixed, max_tokens=COUNT).token_ids == expected
        kinds = engine.runner.executor.program_keys
    assert "advance_embedded" in {name for name, _ in kinds}


def test_a_flag_of_a_later_version_is_refused():
    limits = Limits(slots=3, blocks=(9,), block_size=4, max_blocks_per_seq=4, vocab=96)
    runner = HashRunner(limits)
    runner.submit(admission(limits, 1, [1]))
    frame = one_step(limits, [(1, [5, 6])], step=1, decoding=0)
    frame[HEADER_WORD.flags] |= 1 << 9
    with pytest.raises(ProtocolError, match="word 7 \\(flags\\): found 512, accepts"):
        runner.submit(frame)
