"""Parameters assembled from stored tensors: stacks and fused slices, for every rank."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest

from inl.backend.base import Traits
from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray, cast, widen
from inl.ops.moe import Experts
from inl.spec.weights import FusedSlice, Group, Param
from inl.weights.load import load_weights, read_shard, stored_specs
from inl.weights.plan import plan_weights

E, INNER, HIDDEN = 3, 64, 96


class Files(Checkpoint):
    path = Path("memory")
    eos_token_ids = ()
    chat_template = None

    def __init__(self, tensors):
        self.config, self._tensors = {}, tensors

    def names(self):
        return list(self._tensors)

    def spec(self, name):
        return self._tensors[name].dtype, self._tensors[name].shape

    def tensor(self, name):
        return self._tensors[name]

    def tokenizer(self):
        raise self.missing("tokenizer")

    def close(self):
        pass


def packed(values, dtype):
    """Values in the encoding of a file."""
    if not dtype.startswith("q"):
        return cast(values, dtype)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    data = gguf.quantize(values.astype(np.float32), kind)
    return HostArray(data, dtype, values.shape)


def read(
    param, tensors, *, rank=0, ranks=1, dtype="float32", expert_rank=0,
    expert_ranks=1,
):  # fmt: skip
    files = Files(tensors)
    group = Group("expert_linear", weight=param)
    planned = plan_weights(
        group, (), stored_specs(files), ranks=ranks, expert_ranks=expert_ranks
    )
    return read_shard(
        files, planned, planned.group.params["weight"], rank, dtype,
        expert_rank=expert_rank,
    )  # fmt: skip


@pytest.fixture
def numbers():
    return np.random.default_rng(3).standard_normal((E, INNER, HIDDEN))


def share(values, axis, rank, ranks):
    return np.split(values, ranks, axis)[rank]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "q8_0", "q4_0"])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stacked_tensors(dtype, axis, ranks, numbers):
    tensors = {f"x.{n}.w": packed(part, dtype) for n, part in enumerate(numbers)}
    stored = np.stack([dequantize(one) for one in tensors.values()])
    param = Param("x.{}.w", numbers.shape, axis=axis, stack=E)
    for rank in range(ranks):
        found = read(param, tensors, rank=rank, ranks=ranks)
        expected = share(stored, axis, rank, ranks)
        assert found.shape == expected.shape
        assert np.array_equal(dequantize(found), expected)
        whole_rows = axis == 1 or ranks == 1
        assert found.dtype == (dtype if dtype[0] == "q" and whole_rows else "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "q8_0"])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", [0, 1])
def test_fused_slices(dtype, axis, ranks, place, numbers):
    both = packed(np.concatenate([numbers, 2 * numbers], 1), dtype)
    half = share(dequantize(both), 1, place, 2)
    param = Param("both", numbers.shape, axis=axis, fused_slice=FusedSlice(1, place, 2))
    for rank in range(ranks):
        found = read(param, {"both": both}, rank=rank, ranks=ranks)
        expected = share(half, axis, rank, ranks)
        assert np.array_equal(dequantize(found), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0"])
@pytest.mark.parametrize("axis", [1, 2])
def test_three_dimensional_tensors_are_sharded_on_any_axis(dtype, axis, numbers):
    whole = packed(numbers, dtype)
    param = Param("w", numbers.shape, axis=axis)
    assert read(param, {"w": whole}) is whole
    for rank in range(2):
        found = read(param, {"w": whole}, rank=rank, ranks=2, dtype="bfloat16")
        expected = share(dequantize(whole), axis, rank, 2)
        assert dequantize(found).shape == expected.shape
        kept = axis == 1 or dtype == "bfloat16"
        rounded = expected if kept else widen(cast(expected, "bfloat16"))
        assert np.array_equal(dequantize(found), rounded)


@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0"])
@pytest.mark.parametrize("layout", ["stack", "fused", "whole"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_a_rank(dtype, layout, ranks, numbers):
    if layout == "stack":
        tensors = {f"{n}": packed(part, dtype) for n, part in enumerate(numbers)}
        param = Param("{}", numbers.shape, axis=1, stack=E)
    elif layout == "fused":
        both = np.concatenate([2 * numbers, numbers], 1)
        tensors = {"w": packed(both, dtype)}
        fused = FusedSlice(1, 1, 2)
        param = Param("w", numbers.shape, axis=1, fused_slice=fused)
    else:
        tensors = {"w": packed(numbers, dtype)}
        param = Param("w", numbers.shape, axis=1)
    whole = dequantize(packed(numbers, dtype))
    for rank in range(ranks):
        for expert in range(E):
            found = read(
                param, tensors, rank=rank, ranks=ranks, dtype="bfloat16",
                expert_rank=expert, expert_ranks=E,
            )  # fmt: skip
            expected = share(whole, 1, rank, ranks)[expert : expert + 1]
            assert found.dtype == dtype
            assert np.array_equal(dequantize(found), expected)


def test_a_bias_of_experts_is_on_the_first_rank():
    param = Param("b", (E, INNER), axis=1, expert_partial=True)
    bias = np.ones((E, INNER), np.float32)
    for expert in range(2):
        tensors = {"b": cast(bias, "float32")}
        files = Files(tensors)
        group = Group("embedding", weight=param)
        planned = plan_weights(group, (), stored_specs(files), expert_ranks=2)
        found = read_shard(files, planned, param, 0, "float32", expert_rank=expert)
        assert np.array_equal(widen(found), bias * (expert == 0))


def test_tensors_in_the_compute_dtype_are_not_converted(numbers):
    tensors = {f"{n}": packed(part, "bfloat16") for n, part in enumerate(numbers)}
    param = Param("{}", numbers.shape, axis=1, stack=E)
    found = read(param, tensors, dtype="bfloat16")
    assert found.data.dtype == np.uint16
    assert not found.data.flags.writeable
    stored = np.stack([one.data for one in tensors.values()])
    assert np.array_equal(found.data, stored)


def test_a_stack_of_different_dtypes_is_decoded(numbers):
    kinds = ("q8_0", "q4_0", "float16")
    tensors = {
        f"{n}": packed(part, kind)
        for n, (part, kind) in enumerate(zip(numbers, kinds, strict=True))
    }
    found = read(Param("{}", numbers.shape, axis=1, stack=E), tensors)
    expected = np.stack([dequantize(one) for one in tensors.values()])
    assert found.dtype == "float32"
    assert np.array_equal(found.data, expected)


class Lending(NamedTuple):
    """A backend that uses host arrays without a copy."""

    traits = Traits()

    def tensor(self, data):
        return data

    def offers(self, kind):
        return None


def test_loading_experts_allocates_little_extra_memory():
    experts, inner, hidden = 32, 128, 256
    parts = {}
    for kind, shape in (("gate", (inner, hidden)), ("down", (hidden, inner))):
        for n in range(experts):
            parts[f"{n}.{kind}"] = packed(np.ones(shape), "float16")
    files = Files(parts | {f"{n}.up": parts[f"{n}.gate"] for n in range(experts)})
    wide = Param("{}.gate", (experts, inner, hidden), stack=experts)
    narrow = Param("{}.down", (experts, hidden, inner), stack=experts)
    group = Group("experts", gate=wide, up=wide._replace(source="{}.up"), down=narrow)
    planned = plan_weights(group, (), stored_specs(files))
    tracemalloc.start()
    held = load_weights(planned, files, Lending(), "float32")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = 3 * experts * inner * hidden * 4
    assert isinstance(held, Experts)
    assert size <= kept <= peak < 1.1 * size
