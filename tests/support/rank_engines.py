"""Engines on ranks of NumPy backends, one thread each."""

from __future__ import annotations

from inl import InferenceEngine
from inl.backend.collectives import DATA, EXPERT, PIPELINE, TENSOR, Rank
from inl.backend.reference import ReferenceBackend, Rendezvous, ThreadCollectives
from inl.device import Device
from inl.executor.pipeline import Stage
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import start_runner


def over(
    language, ranks, config, stages=1, *, experts=1, rows=1, limits=None,
    collectives=lambda c: c,
):  # fmt: skip
    """An engine on that many ranks along tensor, pipeline, expert and data.

    collectives: changes those of a rank.
    """
    runner = runner_over(
        language, ranks, config, stages, experts=experts, rows=rows, limits=limits,
        collectives=collectives,
    )  # fmt: skip
    return InferenceEngine(language, config=config, runner=runner)


def runner_over(
    language, ranks, config, stages=1, *, experts=1, rows=1, limits=None,
    collectives=lambda c: c,
):  # fmt: skip
    """The runner of such an engine."""
    count = rows * ranks * stages * experts
    axes = (DATA, rows), (PIPELINE, stages), (TENSOR, ranks), (EXPERT, experts)
    rendezvous = Rendezvous(count)

    def make(number):
        own = None
        if count > 1:
            own = collectives(ThreadCollectives(count, number, rendezvous, axes))
        backend = ReferenceBackend(
            Device("reference"), dtype=config.dtype, collectives=own
        )
        rank = Rank(number, count, axes=axes)
        return start_runner(
            language, backend, config, limits=limits, rank=rank.position(TENSOR),
            stage=Stage(rank.position(PIPELINE), stages),
        )  # fmt: skip

    if count == 1:
        return make(0)
    return RankRunner(
        make, count, abort=rendezvous.abort, stages=stages, copies=experts,
        data_ranks=rows,
    )  # fmt: skip
