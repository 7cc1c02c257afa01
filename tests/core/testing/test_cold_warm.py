"""The check that a cached prefix gives the tokens of a cold one, and planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl.spec.message import ADMISSION_WORD, ADMIT, HEADER_WORD
from inl.testing.check import perform
from inl.testing.engine_checks import engine_checks
from inl.testing.target import Target


def late_position(tables, slot, _length):
    """The next token has the position of the last cached one."""
    tables.lengths[slot] -= 1


def next_block(tables, slot, length):
    """The last cached block is read from the entry after it."""
    at = length // SIZE - 1
    tables.blocks[:, slot, at] = tables.blocks[:, slot, at + 1]


def swapped_blocks(tables, slot, length):
    """The first cached block is taken for the block after it."""
    tables.blocks[:, slot, 0] = tables.blocks[:, slot, 1]


SIZE = 16


def results(fault):
    """Results of the check on a NumPy backend whose prefix hits have a fault."""

    def tensor(host):
        values = widen(host)
        return np.array(values, np.float32 if values.dtype.kind == "f" else "int32")

    right = body_kernel(catalog()["admit"], "float32")

    def admit(messages, tables):
        tables = right(messages, tables)
        for frame in messages:
            slot, length = frame[ADMISSION_WORD.slot], frame[ADMISSION_WORD.length]
            if frame[HEADER_WORD.kind] == ADMIT and length and fault:
                fault(tables, slot, length)
        return tables

    def kernels():
        for name, op in catalog().items():
            if not op.composite:
                run = admit if name == "admit" else body_kernel(op, "float32")
                yield Kernel(name, "numpy", run)

    made = simple_backend(
        tensor=tensor,
        numpy=wrap,
        kernels=kernels,
        traits=Traits(dtypes=("float32",), block_size=SIZE),
    )
    target = Target(Device("planted:0"))
    target.__dict__["backend"] = made(target.device)
    checks = [each for each in engine_checks(target) if "cold-warm" in each.name]
    return [perform(check, {}) for check in checks]


def test_a_right_backend_passes():
    (result,) = results(None)
    assert (result.status, result.message) == ("passed", "")


@pytest.mark.parametrize("fault", [late_position, next_block, swapped_blocks])
def test_a_fault_of_prefix_hits_is_found_and_named(fault):
    (result,) = results(fault)
    assert result.name == "engine/cold-warm/float32"
    assert result.status == "failed"
    assert "from the prefix cache" in result.message
    assert "An admission of length" in result.message
