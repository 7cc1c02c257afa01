"""Ranks that divide the rows of a step: texts of one device, planted faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mixture_answers
from depth import mostly_full, scaled
from hash_rows import HashRows
from inl import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.prompt_embeddings import PromptEmbeddings
from inl.errors import RequestError, RunnerError, WeightMismatch
from inl.executor.model_loader import LanguageModel, open_model
from inl.kv.kv_events import BlocksRemoved, BlocksStored, MergedEvents
from inl.models import llama
from inl.placement import ranks
from inl.recording import replay as replaying
from inl.recording.recorder import Recorder
from inl.recording.trace_file import RunHeader, read_trace
from inl.runners import group_runner, row_shares
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.speculation.planner import Speculation
from inl.speculation.step_times import measure_step_times, measure_token_seconds
from inl.testing.hash_runner import HashRunner
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from mixture_answers import answers, check_expert_reads, exact, served
from rank_engines import runner_over
from soak import Parts, WrongText, soak

CONFIG = EngineConfig(backend="reference", dtype="float32", **mixture_answers.OPTIONS)
HF, TENSORS = mixture_answers.made()


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return open_model(mixture_answers.write(folder, HF, TENSORS))


@pytest.fixture(scope="module")
def expected(language):
    return answers(runner_over(language, 1, CONFIG), language)


@pytest.mark.parametrize(
    "sizes", mostly_full([(2, 1, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2)]), ids=str
)
def test_ranks_answer_as_one_device(language, expected, sizes):
    rows, tensor, experts = sizes
    runner = runner_over(language, tensor, CONFIG, experts=experts, rows=rows)
    assert answers(runner, language) == expected
    requests, _ = served(runner)
    for request in requests:
        assert request.output_ids == exact(HF, TENSORS, request)


def test_a_sequence_is_cached_on_its_rank_only(language):
    runner = runner_over(language, 1, replace(CONFIG, max_batch=4), rows=2)
    one = runner_over(language, 1, replace(CONFIG, max_batch=2))
    assert [rank.limits for rank in runner.runners] == [
        replace(one.limits, embedding=0, decode_steps=1)
    ] * 2
    assert runner.limits.slots == 5
    core = EngineCore(runner)
    request = Request(range(3, 23), max_tokens=4)
    core.add(request)
    while core.has_work:
        core.step()
    assert request.data_rank == 0
    used = [
        np.abs(rank.executor.state.caches[0][0][1:]).max() for rank in runner.runners
    ]
    assert used[1] == 0.0 < used[0]


def test_a_rank_reads_its_own_experts_only():
    check_expert_reads(HF, TENSORS, replace(CONFIG, max_adapters=None), rows=2)


def test_a_dense_model_is_whole_on_each_rank(tiny_language, tiny_config):
    texts = []
    for rows in (1, 2):
        requests, _ = served(runner_over(tiny_language, 1, tiny_config, rows=rows))
        texts.append([request.output_ids for request in requests])
    assert texts[0] == texts[1]


@pytest.fixture
def tiny_config():
    return replace(CONFIG, max_adapters=None)


@pytest.fixture
def tiny_language():
    made = tiny_llama(np.random.default_rng(3))
    config = llama.MODEL.config(made[0])
    return LanguageModel(llama.MODEL, config, MemoryCheckpoint(*made))


def test_embeddings_in_prompts_are_refused(language):
    runner = runner_over(language, 1, CONFIG, rows=2)
    rows = np.zeros((2, runner.runners[0].loaded.config.hidden_size), np.float32)
    request = Request([1, 2, 3], embeddings=PromptEmbeddings({0: rows}, 3))
    with pytest.raises(RequestError, match="embeddings"):
        EngineCore(runner).add(request)


def test_experts_that_the_ranks_do_not_divide_are_refused(language):
    sentence = r"axis 0: found 8 entries; accepted: a multiple of 3, the number of"
    with pytest.raises(WeightMismatch, match=sentence):
        runner_over(language, 1, CONFIG, rows=3)


def unexchanged(collectives):
    """Each rank keeps its own rows of its own sum."""

    def first(x, axis):
        size = x.shape[0] // collectives.size(axis)
        return x[size * collectives.index(axis) :][:size]

    collectives.reduce_scatter = first
    return collectives


def turned(collectives):
    """Each rank gets the rows of the next one."""
    real = collectives.reduce_scatter

    def rolled(x, axis):
        return real(np.roll(x, x.shape[0] // collectives.size(axis), 0), axis)

    collectives.reduce_scatter = rolled
    return collectives


def misplaced(monkeypatch):
    """Rows of a step go to the rank after that of their admission."""
    real = row_shares._share

    def wrong(message, head, limits, rank):
        ranks = limits.data_ranks
        return real(message, head, limits, (rank + 1) % ranks)

    monkeypatch.setattr(row_shares, "_share", wrong)


def shifted(monkeypatch):
    """Every rank computes the experts after its own."""
    real = ranks._with_own_ids

    def wrong(spec, args, rank):
        given = list(real(spec, args, rank))
        given[spec.parameters.index("ids")] += np.int32(1)
        return tuple(given)

    monkeypatch.setattr(ranks, "_with_own_ids", wrong)


@pytest.mark.parametrize("fault", [None, unexchanged, turned, misplaced, shifted])
def test_planted_faults_are_found(language, fault, monkeypatch):
    of_exchange = fault in (unexchanged, turned)
    if fault in (misplaced, shifted):
        fault(monkeypatch)
    given = {"collectives": fault} if of_exchange else {}
    requests, _ = served(runner_over(language, 1, CONFIG, rows=2, **given))
    right = all(each.output_ids == exact(HF, TENSORS, each) for each in requests)
    assert right == (fault is None)


KINDS = [{}, {"speculation": Speculation}, {"pooled": True, "adapters": True}]


SOAKS = [(ranks, kind) for ranks in (2, 3) for kind in KINDS]


@pytest.mark.parametrize("case", mostly_full(SOAKS, quick=2), ids=str)
def test_soak(case, report):
    ranks, kind = case
    parts = Parts(runner=HashRows, data_ranks=ranks, **kind)
    counts = soak(5, scaled(100, 800, 150_000), parts, world_steps=100)
    report(f"{ranks} ranks {kind}: {counts['steps']} steps")


def exchanged(monkeypatch):
    """Each rank's tokens are taken for those of the next one."""
    real = row_shares._joined

    def wrong(parts, places, count, empty=0):
        return real(parts, [*places[1:], places[0]], count, empty)

    monkeypatch.setattr(row_shares, "_joined", wrong)


def other_slot(monkeypatch):
    """Releases and admissions go to the rank after the right one."""
    real = group_runner.slot_share

    def wrong(message, head, ranks):
        rank, frame = real(message, head, ranks)
        return (rank + 1) % ranks, frame

    monkeypatch.setattr(group_runner, "slot_share", wrong)


@pytest.mark.parametrize("fault", [exchanged, other_slot])
def test_a_soak_finds_planted_faults(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((RunnerError, WrongText, ValueError)):
        soak(5, 3_000, Parts(runner=HashRows, data_ranks=2), world_steps=300)


def test_blocks_of_several_ranks_are_reported_as_one_cache():
    events = []
    merged = MergedEvents(events.append)
    stored = BlocksStored([b"a", b"b"], None, [1, 2], 1, "")
    merged(stored)
    merged(stored)
    merged(BlocksRemoved([b"a"]))
    assert events == [stored, stored]
    merged(BlocksRemoved([b"a", b"b"]))
    assert events[2:] == [BlocksRemoved([b"a"])]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_trace_is_replayed_on_one_device(is_wrong, tmp_path, monkeypatch):
    """Blocks of all ranks are in one pool there, those of each rank apart."""
    own = Limits(5, (13,), 2, 9, 97)
    limits, path = row_shares.all_ranks_limits(own, 2), tmp_path / "trace"
    recorder = Recorder(lambda: RunHeader(limits, "hash", "float32", "", ""), path)
    core = EngineCore(HashRows(limits), SchedulerConfig(), recorder=recorder)
    requests = [
        Request([number, *range(number % 4)], max_tokens=9, temperature=0.5)
        for number in range(12)
    ]
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    recorder.close()
    assert core.stats.preemptions or core.stats.prefix_hit_tokens
    if is_wrong:

        def wrong(run):
            return run._replace(limits=replace(run.limits, data_ranks=1))

        monkeypatch.setattr(replaying, "_with_one_pool", wrong)
    outcome = replaying.replay(read_trace(path), HashRunner)
    assert outcome.rows > 20
    assert bool(outcome.differences or outcome.skipped) == is_wrong


def test_steps_are_timed_for_drafts(language):
    runner = runner_over(language, 1, CONFIG, rows=2)
    times = measure_step_times(runner, 3, width=3)
    assert times.without_drafts(1) > 0
    assert measure_token_seconds(runner) > 0
