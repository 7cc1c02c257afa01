"""Faults of kernels that compute a part of the experts: ``inl check`` finds each."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import body_kernel
from inl.errors import NoKernel
from inl.ops import catalog
from inl.placement.placement import Placement
from inl.placement.ranks import PlannedCollectives, over_ranks
from inl.spec.dispatch import DynamicOps
from inl.spec.kernel import Kernel
from planted_kernels import failures, target_of

SPEC = catalog()["expert_linear"]
RIGHT = body_kernel(SPEC, "float32")


def offset(x, ids, w):
    return RIGHT(x, ids + np.int32(1), w)


def clamped(x, ids, w):
    return RIGHT(x, ids.clip(0, w.weight.shape[0] - 1), w)


def wrapped(x, ids, w):
    """Negative ids count from the end, as in NumPy."""
    return RIGHT(x, np.where(ids < 0, ids + w.weight.shape[0], ids), w)


FAULTS = {"none": RIGHT, "offset": offset, "clamped": clamped, "wrapped": wrapped}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_part_is_found(fault):
    def kernels():
        yield Kernel(SPEC.name, "planted", RIGHT, run_part=FAULTS[fault])

    target = target_of(kernels, only=(SPEC.name,))
    assert not failures(target, "kernel", "expert_linear/1x4x2")
    found = failures(target, "kernel", "expert_linear/part by planted")
    assert bool(found) == (fault != "none")


def test_a_kernel_of_all_experts_refuses_a_part():
    kernel = Kernel(SPEC.name, "planted", RIGHT)
    backend = target_of().backend
    ranks = PlannedCollectives(backend, Placement(expert=2))
    ops = DynamicOps(over_ranks([kernel], ranks, expert_ranks=2))
    (case, *_) = SPEC.cases(np.random.default_rng(1))
    words = "planted: computes all experts of a layer, not those of one of several"
    with pytest.raises(NoKernel, match=words):
        ops.expert_linear(*case.args)
