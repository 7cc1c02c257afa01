"""Ranks of a tensor-parallel group, as threads, against one rank alone."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from functools import partial
from operator import attrgetter

import numpy as np
import pytest

from depth import mostly_full
from inl.backend.base import Collectives
from inl.backend.reference import (
    ReferenceBackend,
    Rendezvous,
    ThreadCollectives,
    body_kernel,
)
from inl.device import Device
from inl.errors import OutOfMemory, ProtocolError, RunnerError, WeightMismatch
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.placement.ranks import over_ranks
from inl.runners import group_runner as ranks
from inl.runners.group_runner import RankRunner
from inl.spec.dispatch import DynamicOps
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.message import MASKED, Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.spec.tolerance import stored
from inl.spec.tree import leaves
from inl.testing.tiny import (
    MemoryCheckpoint,
    local_runner,
    plain_logits,
    reference_ranks,
    tiny_llama,
)
from inl.testing.traffic import Traffic, play

DEVICE = Device("reference:0")
LIMITS = Limits(slots=8, blocks=(80,), block_size=4, max_blocks_per_seq=12, vocab=96)
STEPS = 40
BOUNDS = {"float32": 1e-5, "float64": 1e-12}


def checkpoint(seed, **sizes):
    return MemoryCheckpoint(*tiny_llama(np.random.default_rng(seed), **sizes))


class Recorder:
    """A Llama that keeps the logits of every step, apart for each thread."""

    def __init__(self):
        self.seen = {}
        self.model = dataclasses.replace(MODEL, head=self._head)

    def _head(self, *args):
        logits = MODEL.head(*args)
        if isinstance(logits, np.ndarray):
            name = threading.current_thread().name
            self.seen.setdefault(name, []).append(logits.copy())
        return logits

    def of(self, rank):
        """Logits of each step on one rank."""
        names = [name for name in self.seen if f"inl-rank-{rank}" in name]
        assert len(names) == 1
        return self.seen[names[0]]


def alone(files, dtype, seed):
    recorder = Recorder()
    backend = ReferenceBackend(DEVICE, dtype=dtype)
    runner = local_runner(backend, recorder.model, files, LIMITS, dtype=dtype)
    texts = play(runner, traffic(seed).frames(STEPS))
    (logits,) = recorder.seen.values()
    return texts, logits


def traffic(seed):
    return Traffic(np.random.default_rng(seed), LIMITS)


def worst(found, expected, frames):
    """Largest relative difference over the rows that were in use."""
    errors = [0.0]
    for got, want, sent in zip(found, expected, frames, strict=True):
        rows = len(sent.takes)
        size = np.abs(want[:rows]).max(-1)
        errors.append(float((np.abs(got - want)[:rows].max(-1) / size).max()))
    return max(errors)


@pytest.mark.parametrize("dtype", mostly_full(["float32", "float64"]))
@pytest.mark.parametrize("ranks", mostly_full([4, 2]))
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ranks_equal_one(ranks, kv_heads, tied, dtype, capsys):
    seed = 100 * ranks + 10 * kv_heads + tied
    files = checkpoint(seed, kv_heads=kv_heads, tied=tied, bias=kv_heads == 4)
    texts, expected = alone(files, dtype, seed)
    recorder = Recorder()
    group = reference_ranks(
        DEVICE, recorder.model, files, LIMITS, ranks=ranks, dtype=dtype
    )
    found = play(group, traffic(seed).frames(STEPS))
    group.close()
    steps = [sent for sent in traffic(seed).frames(STEPS) if sent.takes is not None]
    assert any(sent.decoding and sent.tokens > len(sent.takes) for sent in steps)
    for rank in range(ranks):
        error = worst(recorder.of(rank), expected, steps)
        assert 0 < error <= BOUNDS[dtype], f"rank {rank}"
    assert found == texts
    assert sum(map(len, texts.values())) > STEPS


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_rank_equals_an_uncached_computation(kv_heads, tied):
    files = checkpoint(7 + kv_heads, kv_heads=kv_heads, tied=tied, bias=tied)
    backend = ReferenceBackend(DEVICE, dtype="float64")
    runner = local_runner(backend, MODEL, files, LIMITS, dtype="float64")
    source = traffic(5)
    texts = play(runner, source.frames(STEPS))
    tensors = {name: files.tensor(name).data for name in files.names()}
    assert len(texts) > 5
    for name, tokens in texts.items():
        ids = source.prompts[name] + tokens
        logits = plain_logits(files.config, tensors, ids[:-1])[-len(tokens) :]
        assert tokens == list(logits.argmax(-1))


def test_every_tensor_of_the_tiny_model_matters():
    config, tensors = tiny_llama(np.random.default_rng(0), kv_heads=4, bias=True)
    ids = [5, 17, 80, 3, 44, 9]
    whole = plain_logits(config, tensors, ids)[-1]
    for name, tensor in tensors.items():
        changed = plain_logits(config, {**tensors, name: 0.9 * tensor}, ids)[-1]
        assert np.abs(changed - whole).max() > 1e-3 * np.abs(whole).max(), name


def test_ranks_that_do_not_divide_a_tensor_are_refused_by_its_name():
    files = checkpoint(1)
    with pytest.raises(
        WeightMismatch,
        match=r"layers\.0\.self_attn\.q_proj\.weight: axis 0: found 64 entries; .*of 3",
    ):
        reference_ranks(DEVICE, MODEL, files, LIMITS, ranks=3).close()


def test_heads_that_would_lie_across_ranks_are_refused():
    files = checkpoint(1, kv_heads=2)
    with pytest.raises(
        WeightMismatch, match="layers 0 to 1: found 2 key-value heads for 4 ranks"
    ):
        reference_ranks(DEVICE, MODEL, files, LIMITS, ranks=4).close()


class Deaf(Collectives):
    """A rank that keeps its own part of every ``nth`` sum."""

    def __init__(self, real, nth):
        self.real, self.nth, self.calls = real, nth, 0

    def size(self, axis):
        return self.real.size(axis)

    def all_reduce(self, x, axis):
        self.calls += 1
        total = self.real.all_reduce(x, axis)
        return x if self.calls % self.nth == 0 else total

    def all_gather(self, x, axis):
        return self.real.all_gather(x, axis)


def group_of(files, collectives, model=MODEL, ranks=2):
    """A rank group whose collectives are ``collectives(rank, real)``."""
    meeting = Rendezvous(ranks, seconds=20)

    def make(rank):
        real = ThreadCollectives(ranks, rank, meeting)
        backend = ReferenceBackend(DEVICE, collectives=collectives(rank, real))
        return local_runner(backend, model, files, LIMITS, rank=rank, ranks=ranks)

    return RankRunner(make, ranks, abort=meeting.abort)


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_skipped_sum_is_found(deaf):
    """The comparison above can fail: one sum in five is skipped on one rank."""
    files = checkpoint(3)
    texts, expected = alone(files, "float32", 3)
    recorder = Recorder()
    group = group_of(
        files,
        lambda rank, real: Deaf(real, 5) if rank == deaf else real,
        recorder.model,
    )
    found = play(group, traffic(3).frames(STEPS))
    group.close()
    steps = [sent for sent in traffic(3).frames(STEPS) if sent.takes is not None]
    # The last gather gives every rank the same logits, so the ranks agree on tokens.
    error = worst(recorder.of(0), expected, steps)
    assert error > 100 * BOUNDS["float32"]
    assert found != texts


class Crossed(Deaf):
    """A rank that concatenates the parts of a gather in its own order."""

    def all_gather(self, x, axis):
        parts = np.split(self.real.all_gather(x, axis), 2, axis=-1)
        return np.concatenate(parts[::-1], axis=-1)


def test_ranks_that_choose_other_tokens_are_named():
    group = group_of(
        checkpoint(3),
        lambda rank, real: Crossed(real, 99) if rank == 1 else real,
    )
    with pytest.raises(RunnerError, match=r"rank 1 of 2 .* step 1: sampled \[\[\d+"):
        play(group, traffic(3).frames(STEPS))
    group.close()


class Twins(Deaf):
    """Two ranks that always hold the same."""

    def all_reduce(self, x, axis):
        return 2 * x

    def all_gather(self, x, axis):
        return x


@pytest.mark.parametrize(
    "op",
    [spec for spec in catalog().values() if spec.composite],
    ids=attrgetter("name"),
)
def test_a_kernel_of_one_device_is_given_the_sums_of_its_op(op):
    """Every op that sums over ranks says so, and only those."""
    primitives = [
        Kernel(spec.name, "numpy", body_kernel(spec, "float64"))
        for spec in catalog().values()
        if not spec.composite
    ]
    alone = DynamicOps(primitives)
    fused = Kernel(op.name, "fused", partial(op.body, alone))
    plain = DynamicOps(over_ranks(primitives, Twins(None, 0)))
    wrapped = DynamicOps(over_ranks([*primitives, fused], Twins(None, 0)))
    for case in itertools.islice(op.cases(np.random.default_rng(4)), 4):
        args = [stored(case, "float64", np.float64) for _ in range(2)]
        want = op.body(plain, *args[0], **case.attrs)
        found = getattr(wrapped, op.name)(*args[1], **case.attrs)
        for a, b in zip(leaves(found), leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


class Breaks(Collectives):
    """A rank that fails in its ``nth`` sum."""

    def __init__(self, real, nth):
        self.real, self.nth, self.calls = real, nth, 0

    def size(self, axis):
        return self.real.size(axis)

    def all_reduce(self, x, axis):
        self.calls += 1
        if self.calls == self.nth:
            raise OSError("cable out")
        return self.real.all_reduce(x, axis)

    def all_gather(self, x, axis):
        return self.real.all_gather(x, axis)


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_failing_rank_stops_the_group_at_once_and_is_told_once(broken):
    before = {*threading.enumerate()}
    group = group_of(
        checkpoint(3),
        lambda rank, real: Breaks(real, 37) if rank == broken else real,
        ranks=4,
    )
    with pytest.raises(RunnerError, match=f"rank {broken} of 4.*cable out") as caught:
        play(group, traffic(3).frames(STEPS))
    assert isinstance(caught.value.__cause__, OSError)
    for call in (group.collect, lambda: group.submit(step_of(Bucket(1, 1)))):
        with pytest.raises(RunnerError, match=r"rank . of . failed before") as again:
            call()
        assert again.value.__cause__ is None
    group.close()
    group.close()
    assert {*threading.enumerate()} <= before


class Full(Breaks):
    """A rank that has no memory for its ``nth`` sum."""

    def all_reduce(self, x, axis):
        try:
            return super().all_reduce(x, axis)
        except OSError:
            raise OutOfMemory("4 bytes do not fit, 3 bytes are free") from None


def test_a_rank_alone_without_memory_ends_the_group_with_that_error(monkeypatch):
    monkeypatch.setattr(ranks, "OUT_OF_MEMORY_SECONDS", 0.2)
    before = {*threading.enumerate()}
    group = group_of(checkpoint(3), lambda rank, real: Full(real, 3) if rank else real)
    group.submit(
        admit_frame(1, [[1, 2]], groups=1, max_blocks_per_seq=LIMITS.max_blocks_per_seq)
    )
    group.submit(step_of(Bucket(1, 1)))
    with pytest.raises(OutOfMemory, match=r"rank 1 of 2 failed: .*4 bytes do not"):
        group.collect()
    with pytest.raises(RunnerError, match=r"rank . of . failed before"):
        group.submit(step_of(Bucket(1, 1)))
    group.close()
    assert {*threading.enumerate()} <= before


def test_a_rank_that_cannot_start_is_named():
    before = {*threading.enumerate()}

    def make(rank):
        if rank == 1:
            raise MemoryError("no room")
        return local_runner(ReferenceBackend(DEVICE), MODEL, checkpoint(3), LIMITS)

    with pytest.raises(
        RunnerError, match="rank 1 of 2 failed: MemoryError: no room"
    ) as caught:
        RankRunner(make, 2, abort=lambda: None)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert {*threading.enumerate()} <= before


def step_of(bucket, tokens=(1,), **more):
    return step_frame(
        bucket, [Row(1, tokens)], step=1, groups=1, block_size=4, decode_rows=0, **more
    )


def test_submit_does_not_wait_for_a_rank():
    gate = threading.Event()

    class Slow(Deaf):
        def all_reduce(self, x, axis):
            assert gate.wait(300)
            return self.real.all_reduce(x, axis)

    group = group_of(checkpoint(3), lambda rank, real: Slow(real, 1))
    group.submit(
        admit_frame(1, [[1, 2]], groups=1, max_blocks_per_seq=LIMITS.max_blocks_per_seq)
    )
    message = step_of(Bucket(1, 1))
    group.submit(message)
    message[:] = 0  # the caller's to use again
    group.submit(step_of(Bucket(1, 1)))
    with pytest.raises(ProtocolError, match="2 steps are in flight"):
        group.submit(step_of(Bucket(1, 1)))
    gate.set()
    assert group.collect().step == 1
    assert group.collect().step == 1
    with pytest.raises(ProtocolError, match="no step is in flight"):
        group.collect()
    group.close()
    with pytest.raises(RunnerError, match="closed"):
        group.collect()


def test_closing_lets_go_of_waiting_ranks():
    gate = threading.Event()

    class Stuck(Deaf):
        def all_reduce(self, x, axis):
            gate.wait(1)
            return self.real.all_reduce(x, axis)

    group = group_of(checkpoint(3), lambda rank, real: Stuck(real, 1) if rank else real)
    group.submit(
        admit_frame(1, [[1, 2]], groups=1, max_blocks_per_seq=LIMITS.max_blocks_per_seq)
    )
    group.submit(step_of(Bucket(1, 1)))
    group.close()


def test_masks_reach_every_rank():
    group = reference_ranks(DEVICE, MODEL, checkpoint(3), LIMITS, ranks=2)
    group.submit(
        admit_frame(1, [[1, 2]], groups=1, max_blocks_per_seq=LIMITS.max_blocks_per_seq)
    )
    group.submit(step_of(Bucket(2, 1), (4, 5), flags=MASKED))
    with pytest.raises(ProtocolError, match="step 1 waits for its masks"):
        group.collect()
    with pytest.raises(ProtocolError, match="sample: step 9 does not wait for masks"):
        group.sample(9, np.zeros((1, 3), np.int32))
    group.sample(1, np.array([[0, 1 << 7, 0]], np.int32))
    assert group.collect().tokens[0, 0] == 32 + 7
    group.close()
