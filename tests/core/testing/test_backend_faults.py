"""Faults of tensors, of kernel lists and of programs: each is found and named."""

from __future__ import annotations

import numpy as np
import pytest

from inl.dtypes import wrap
from planted_kernels import failures, target_of, tensor, with_fault


def message_of(target, section, name):
    (found,) = failures(target, section, name)
    return found.first.message


def staged(copy):
    """Copies of arrays of one shape share a buffer."""
    buffers = {}

    def shared(x):
        x = copy(x)
        buffer = buffers.setdefault((x.shape, x.dtype), np.empty_like(x))
        buffer[...] = x
        return buffer

    return shared


def short(copy):
    """Numbers beyond 2^20 are not copied."""

    def cut(x):
        x = copy(x)
        x.reshape(-1)[1 << 20 :] = 0
        return x

    return cut


def flushed(host):
    found = tensor(host)
    if found.dtype.kind == "f":
        found[np.abs(found) < 1e-25] = 0
    return found


STAGED = staged(np.array)
SHARED, SHORT = "a buffer that copies share", "wrong values from 1,048,579 numbers"


@pytest.mark.parametrize(
    ("fields", "name", "says"),
    [
        ({"tensor": staged(tensor)}, "copies", SHARED),
        ({"numpy": lambda x: wrap(STAGED(x))}, "copies", SHARED),
        ({"tensor": short(tensor)}, "copies", SHORT),
        ({"numpy": lambda x: wrap(short(np.array)(x))}, "copies", SHORT),
        ({"tensor": flushed}, "float32", "values changed in a round trip"),
    ],
    ids=["tensor shares", "numpy shares", "tensor short", "numpy short", "flushed"],
)
def test_copies_that_are_wrong_are_found(fields, name, says):
    assert says in message_of(target_of(**fields), "backend", f"backend/tensor/{name}")


def test_kernels_that_are_listed_once_are_found():
    kernels = with_fault("linear", lambda run: run)()
    target = target_of(lambda: kernels)
    assert "each call lists all of them" in message_of(
        target, "backend", "backend/kernels"
    )


def by_key(key):
    programs = {}

    def compile_program(function, bucket, _consumes, info):
        if bucket is None:
            return function
        return programs.setdefault(key(info), function)

    return compile_program


@pytest.mark.parametrize(
    "key",
    [
        lambda info: (info.limits, info.bucket),
        lambda info: (info.name, info.limits, info.bucket),
    ],
    ids=["bucket", "bucket and name"],
)
def test_programs_that_are_mixed_up_are_found(key):
    target = target_of(compile=by_key(key))
    found = message_of(target, "runner", "runner/programs")
    assert "a program must be that of the function that `compile` got" in found


def test_a_backend_whose_largest_bucket_has_one_row_passes():
    from inl.spec.step import Bucket

    def buckets(limits):
        rows = min(4, limits.slots - 1)
        sizes = sorted({(1, 1), (rows, rows), (64, 1)})
        return [
            Bucket(tokens=tokens, rows=count, sampler=name)
            for tokens, count in sizes
            for name in limits.samplers
        ]

    for name in ("pooled", "scored", "padding", "programs"):
        assert failures(target_of(buckets=buckets), "runner", f"runner/{name}") == []
