"""Backends of functions: capabilities that know their device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from inl.backend.base import Collectives, ForkSafety, Rank, Ranks
from inl.backend.reference import Rendezvous, ThreadCollectives
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.plugin import simple_backend

MEETING = Rendezvous(2)
make = partial(simple_backend, tensor=widen, numpy=wrap, kernels=lambda: ())


def join(device, rank):
    joined = [ThreadCollectives(rank.ranks, rank.number, MEETING)]
    return make(capabilities=joined)(device)


def test_a_backend_of_functions_opens_the_ranks_of_its_device():
    backend = make(capabilities=lambda device: [Ranks(partial(join, device))])
    opened = backend(Device("npu:3"))
    assert opened.offers(Collectives) is None

    def total(number):
        rank = Rank(number=number, ranks=2, seconds=1.0)
        joined = opened.offers(Ranks).joining(rank)
        assert joined.device == Device("npu:3")
        found = joined.offers(Collectives)
        return found.all_reduce(np.full(2, number + 1), "tensor").tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(total, range(2))) == [[3, 3], [3, 3]]


def test_capabilities_are_made_once_for_each_backend():
    devices = []

    def offered(device):
        devices.append(device)
        return (ForkSafety(),)

    backend = make(capabilities=offered)(Device("npu:1"))
    assert [backend.offers(ForkSafety), backend.offers(Ranks)] == [ForkSafety(), None]
    assert devices == [Device("npu:1")]
