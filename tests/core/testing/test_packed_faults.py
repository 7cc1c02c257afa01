"""Kernels that pack blocks of a checkpoint wrongly: each dtype is found and named."""

from __future__ import annotations

import pytest

from inl.backend.reference import body_kernel
from inl.checkpoints.blocks.dtypes import BLOCK_DTYPES, dequantize
from inl.dtypes import HostArray, wrap
from inl.ops import catalog
from inl.ops.linear import Linear
from inl.spec.kernel import Kernel
from inl.spec.weights import in_layout
from planted_kernels import failures, target_of

Decoded = in_layout("decoded")(Linear)


def packing(wrong="", change=lambda data: data):
    """List kernels, one of which decodes the blocks that it packs.

    change: of the bytes of blocks in the dtype ``wrong``.
    """

    def pack(group, backend, _dtype):
        stored = group["weight"]
        data = change(stored.data.copy()) if stored.dtype == wrong else stored.data
        values = dequantize(HostArray(data, stored.dtype, stored.shape))
        bias = group.get("bias")
        tensors = wrap(values), None if bias is None else wrap(dequantize(bias))
        return Decoded(*(x if x is None else backend.tensor(x) for x in tensors))

    def can_pack(**specs):
        kind = specs["weight"].dtype
        return None if kind in BLOCK_DTYPES else f"weights in {kind}"

    def linear(x, w):
        y = x @ w.weight.T
        return y if w.bias is None else y + w.bias

    def kernels():
        yield Kernel(
            "linear", "blocks", linear, layout="decoded", pack=pack, can_pack=can_pack,
            preference=1,
        )  # fmt: skip
        for op in catalog().values():
            if not op.composite:
                yield Kernel(op.name, "planted", body_kernel(op, "float32"))

    return kernels


def last_byte_lost(data):
    data[..., -1] = 0
    return data


def test_right_kernels_of_blocks_pass():
    target = target_of(packing(), only=("linear",))
    assert failures(target, "kernel", "linear/packed/") == []


def test_a_kernel_whose_pack_raises_is_named():
    def short(data):
        raise IndexError("block 17")

    target = target_of(packing("q4_k", short), only=("linear",))
    (found,) = failures(target, "kernel", "linear/packed/")
    text = "\n".join(found.lines())
    assert "linear/blocks on planted:0: pack raised IndexError: block 17" in text
    assert "weights in q4_k" in text


@pytest.mark.parametrize("kind", BLOCK_DTYPES)
def test_a_dtype_of_blocks_that_is_packed_wrongly_is_named(kind):
    target = target_of(packing(kind, last_byte_lost), only=("linear",))
    (found,) = failures(target, "kernel", "linear/packed/")
    text = "\n".join(found.lines())
    assert "linear/blocks" in text
    assert f"weights in {kind}" in text
    names = {result.name.split("/")[2] for result in (found.first, *found.same)}
    assert names == {kind}
