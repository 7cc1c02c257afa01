"""Packed experts, with few and many slots, against the float64 bodies."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from triton_place import DTYPES, IS_SLOW, PLACE

from inl.dtypes import HostArray
from inl.ops import catalog
from inl.ops.moe import ExpertLinear, Experts
from inl.ops.moe_cases import choice, shares
from inl.spec.op import Case, Spec
from inl.spec.tolerance import judge
from quantized_blocks import decoded, random_blocks

# isort: split
from inl_torch.tensors import from_host
from inl_torch.triton.moe import experts as ours
from inl_torch.triton.moe.packed import pack_stack

KERNELS = {kernel.op: kernel for kernel in ours.PACKED_KERNELS}
KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp8", "mxfp4")
MAIN = ("q4_1", "q8_0", "mxfp4")
"""Those of KINDS whose kernels differ most."""

CASES = [
    (kind, dtype)
    for kind in KINDS
    for dtype in DTYPES
    if not IS_SLOW or dtype != "float32" or kind in MAIN[1:]
]

ROUTINGS = {
    "few slots": (1, 8, 2, lambda rng, *sizes: choice(rng, *sizes)),
    "many slots": (40, 5, 3, lambda rng, *sizes: choice(rng, *sizes)),
    "all to one": (37, 4, 1, lambda _, t, *__: np.full((t, 1), 2, np.int32)),
}
"""Tokens, experts, experts per token, and the choice of experts."""


class Place:
    def tensor(self, data):
        return from_host(data).to(PLACE)


def stack(rng, kind, *shape):
    """Blocks, and their values in float64."""
    array = random_blocks(rng, kind, shape)
    return array, decoded(array)


def check(op, case, group, dtype, on_torch, on_host, seed, *, run="run"):
    spec, kernel = catalog()[op], KERNELS[op]
    *inputs, _ = on_torch(spec, case, dtype, PLACE)
    w = kernel.pack(group, Place(), dtype)
    assert kernel.refuse(*inputs, w, **case.attrs) is None
    spoiled = [torch.full((65536,), float("nan"), device=PLACE) for _ in range(8)]
    del spoiled
    got = on_host(getattr(kernel, run)(*inputs, w, **case.attrs))
    verdict = judge(spec, case, dtype, got)
    assert verdict.passed, f"{op}/{case.name} {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts(kind, name, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    tokens, count, k, chosen = ROUTINGS[name]
    inner, hidden = 32, 96
    group, values = {}, []
    for field in Experts._fields:
        shape = (hidden, inner) if field == "down" else (inner, hidden)
        group[field], numbers = stack(rng, kind, count, *shape)
        values.append(numbers)
    args = rng.standard_normal((tokens, hidden)), chosen(rng, tokens, count, k)
    activation = "silu" if tokens % 2 else "gelu_tanh"
    case = Case(
        f"{kind}, {name}",
        (*args, shares(rng, tokens, k), Experts(*values)),
        {"activation": activation},
    )
    check("experts", case, group, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("dtype", DTYPES[-1:] if IS_SLOW else DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("kind", MAIN)
def test_expert_linear(kind, name, dtype, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    tokens, count, k, chosen = ROUTINGS[name]
    array, values = stack(rng, kind, count, 35, 160)
    ids = chosen(rng, tokens, count, k)
    for slots in {1, k}:
        x = 0.5 + rng.standard_normal((tokens, slots, 160))
        case = Case(f"{kind}, {name}, {slots}", (x, ids, ExpertLinear(values)))
        group = {"weight": array}
        check("expert_linear", case, group, dtype, on_torch, on_host, seed)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", MAIN[-1:])
def test_experts_of_other_ranks_add_nothing(kind, tokens, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    ids = (choice(rng, tokens, 8, 3) - 2).astype(np.int32)
    group, values = {}, []
    for field in Experts._fields:
        shape = (96, 32) if field == "down" else (32, 96)
        group[field], numbers = stack(rng, kind, 4, *shape)
        values.append(numbers)
    x = rng.standard_normal((tokens, 96))
    args = x, ids, shares(rng, tokens, 3), Experts(*values)
    case, given = Case(kind, args, {"activation": "silu"}), (on_torch, on_host, seed)
    check("experts", case, group, "bfloat16", *given, run="run_part")
    case = Case(kind, (x[:, None], ids, ExpertLinear(values[0])))
    group = {"weight": group["gate"]}
    check("expert_linear", case, group, "bfloat16", *given, run="run_part")


def test_decoded_experts_stay_dense(seed, on_torch, on_host):
    """Down matrices whose columns are sharded inside of blocks were decoded."""
    rng = np.random.default_rng(seed)
    parts = [stack(rng, "q8_0", 4, *shape) for shape in ((64, 96), (64, 96), (96, 64))]
    arrays = [array for array, _ in parts]
    arrays[2] = HostArray(parts[2][1].astype(np.float32), "float32", (4, 96, 64))
    for tokens in (1, 20):
        args = rng.standard_normal((tokens, 96)), choice(rng, tokens, 4, 2)
        w = Experts(*(values for _, values in parts))
        case = Case(
            "decoded", (*args, shares(rng, tokens, 2), w), {"activation": "silu"}
        )
        group = dict(zip(Experts._fields, arrays, strict=True))
        assert KERNELS["experts"].pack(group, Place(), "float32").down.scales is None
        check("experts", case, group, "float32", on_torch, on_host, seed)


@pytest.mark.parametrize("kind", ["q4_1", "mxfp4"])
def test_packing_does_not_decode(kind, seed):
    """The host never has a copy of the matrices in 16 bits."""
    array, _ = stack(np.random.default_rng(seed), kind, 4, 256, 1024)
    tracemalloc.start()
    try:
        pack_stack(array, Place(), "bfloat16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * array.data.nbytes < 2 * array.size


def test_a_wrong_scale_is_found(seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    array, values = stack(rng, "mxfp4", 5, 35, 160)
    array.data[3, 30, 17] += 1
    x, ids = rng.standard_normal((40, 1, 160)), choice(rng, 40, 5, 3)
    case = Case("wrong", (x, ids, ExpertLinear(values)))
    with pytest.raises(AssertionError, match="error"):
        check(
            "expert_linear", case, {"weight": array}, "bfloat16", on_torch, on_host,
            seed,
        )  # fmt: skip


def test_refusals():
    refuse = KERNELS["experts"].can_pack
    four, eight = Spec((2, 32, 64), "q4_1"), Spec((2, 32, 64), "mxfp8")
    plain = Spec((2, 32, 64), "bfloat16")
    assert refuse(gate=four, up=four, down=eight) is None
    assert refuse(gate=four, up=eight, down=four) == (
        "gate is stored as q4_1, up as mxfp8"
    )
    assert "down is stored as bfloat16, not as" in refuse(
        gate=four, up=four, down=plain
    )
    assert "weight is stored as bfloat16" in KERNELS["expert_linear"].can_pack(
        weight=plain
    )
