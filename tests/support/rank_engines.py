"""Engines on tensor-parallel ranks of NumPy backends, one thread each."""

from __future__ import annotations

from inl import InferenceEngine
from inl.backend.reference import ReferenceBackend, Rendezvous, ThreadCollectives
from inl.device import Device
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import start_runner


def over(language, ranks, config):
    """An engine on that many ranks."""
    rendezvous = Rendezvous(ranks)

    def make(rank):
        collectives = ThreadCollectives(ranks, rank, rendezvous) if ranks > 1 else None
        backend = ReferenceBackend(
            Device("reference"), dtype=config.dtype, collectives=collectives
        )
        return start_runner(language, backend, config, rank=rank)

    if ranks == 1:
        return InferenceEngine(language, config=config, runner=make(0))
    runner = RankRunner(make, ranks, abort=rendezvous.abort)
    return InferenceEngine(language, config=config, runner=runner)
