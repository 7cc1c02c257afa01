"""Weights of the persistent kernel: what it reads in place, and packed copies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from inl.spec.kernel import PLAIN
from inl_cuda.persistent.shape import DIM, RANKS, Launch, Shape
from inl_torch.eager.linear import QKV
from inl_torch.eager.mlp import GATE_UP


class PackedWeights(NamedTuple):
    """Weights of all layers in the order in which threads read them."""

    out: torch.Tensor
    """Output projections: a head of the columns of a block's rows is contiguous."""
    down: torch.Tensor
    """Down projections: the columns of a block's units are contiguous."""
    gains: torch.Tensor
    """float32 [2 * layers + 1, H]: the norms of each layer, and the last one."""


def refuse_layouts(tree: Any) -> str | None:
    """Return why the kernel does not take weights of these layouts.

    tree: loaded weights, or their plans.
    """
    layouts = [(tree.embed, PLAIN), (tree.head, PLAIN)]
    for layer in tree.layers:
        attention = layer.attention
        if (attention.q_norm, attention.k_norm, attention.sinks) != (None,) * 3:
            return "takes no norms of heads and no sinks"
        layouts += [(attention.qkv, QKV), (attention.out, PLAIN),
                    (layer.mlp.mlp, GATE_UP)]  # fmt: skip
    for group, accepted in layouts:
        layout = getattr(group, "layout", PLAIN)
        if layout != accepted:
            return f"takes weights in layout {accepted}, found {layout}"
    return None


def refuse_weights(weights: Any) -> str | None:
    """Return why the kernel does not take loaded weights, ``None`` if it does."""
    if reason := refuse_layouts(weights):
        return reason
    layers = weights.layers
    projections = [part for each in layers for part in each.attention[1:3]]
    if any(part.bias is not None for part in (weights.head, *projections)):
        return "takes no biases"
    matrices = [weights.head.weight]
    for layer in layers:
        matrices += [layer.attention.qkv.weight, layer.mlp.mlp.gate_up]
    if any(matrix.dtype != torch.bfloat16 for matrix in matrices):
        return "takes weights in bfloat16"
    if any(x.data_ptr() % 16 or not x.is_contiguous() for x in matrices):
        return "takes matrices that begin at a multiple of 16 bytes"
    return None


def pack(weights: Any, shape: Shape, launch: Launch) -> PackedWeights:
    """Copy the matrices that are read in another order than by rows."""
    layers, head = weights.layers, weights.head.weight
    out = head.new_empty(len(layers), shape.hidden, shape.heads * DIM)
    down = head.new_empty(len(layers), shape.hidden, shape.inner)
    norms = []
    for index, layer in enumerate(layers):
        packed = pack_out(layer.attention.out.weight, shape.heads)
        out[index].view(packed.shape).copy_(packed)
        packed = pack_down(layer.mlp.mlp.down, launch.blocks)
        down[index].view(packed.shape).copy_(packed)
        norms += [layer.attention.norm.weight, layer.mlp.norm.weight]
    gains = torch.stack([*norms, weights.norm.weight]).float()
    return PackedWeights(out, down, gains)


def pack_out(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder [H, heads * 64] to [heads, ranks, 2, H / ranks, 4, 8].

    Four threads multiply a row; each reads 8 numbers twice, at once with all threads.
    """
    parts = matrix.view(RANKS, len(matrix) // RANKS, heads, DIM // 16, 2, 8)
    return parts.permute(2, 0, 4, 1, 3, 5)


def pack_down(matrix: torch.Tensor, blocks: int) -> torch.Tensor:
    """Reorder [H, I] to [blocks, units / 4, H / 2, 8], of I / blocks units.

    A thread multiplies two rows: it reads 8 numbers of them at once with all threads.
    """
    hidden, inner = matrix.shape
    units = inner // blocks
    parts = matrix.view(hidden, blocks, units).transpose(0, 1)
    return parts.reshape(blocks, hidden // 2, units // 4, 8).transpose(1, 2)
