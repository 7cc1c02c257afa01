"""Fuses recorded instructions into the compound ones of the library.

A norm is fused into the product that reads it, an addition into the layer norm that
reads it; rotation and head norms are fused into
attention. An instruction is removed only if no other step reads its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from inl_cpu.encoding import Operand
from inl_cpu.instructions import (
    Add,
    AddNorm,
    Attention,
    Copy,
    LayerNorm,
    Linear,
    RmsNorm,
    Rope,
)
from inl_cpu.recording import Step


def fuse(steps: Sequence[Step], outputs: Set[int]) -> list[Step]:
    """Fuse where possible; ``outputs`` are the buffers read after the program."""
    readers: Counter[int] = Counter(outputs)
    for step in steps:
        readers.update(step.reads())
    done: list[Step] = []
    for step in steps:
        if isinstance(step, Linear):
            step = _fuse_norm(step, done, readers)
        elif isinstance(step, Attention):
            step = _fuse_heads(step, done, readers)
        elif isinstance(step, LayerNorm):
            step = _fuse_addition(step, done, readers)
        done.append(step)
    return done


def _has_one_reader(operand: Operand, readers: Counter[int]) -> bool:
    """Whether an operand is a scratch buffer that a single step reads."""
    return operand.buffer > 0 and readers[operand.buffer] == 1


def _fuse_norm(
    linear: Linear[Operand], done: list[Step], readers: Counter[int]
) -> Linear[Operand]:
    """Fuse the norm just before a product, with its addition, into the product."""
    if not done or not _has_one_reader(linear.x, readers):
        return linear
    fused = _with_norm(linear, done[-1])
    if fused is None or not fused.has_distinct_outputs():
        return linear
    done.pop()
    return fused


def _with_norm(linear: Linear[Operand], norm: Step) -> Linear[Operand] | None:
    if isinstance(norm, AddNorm) and norm.y == linear.x:
        return linear.replace(
            x=norm.residual,
            delta=norm.delta,
            norm_weight=norm.weight,
            sum=norm.sum,
            eps=norm.eps,
            flags=linear.flags | norm.flags,
        )
    if isinstance(norm, RmsNorm) and norm.y == linear.x and norm.heads == 1:
        if norm.weight is None:
            return None
        return linear.replace(
            x=norm.x,
            x_stride=norm.x_stride,
            norm_weight=norm.weight,
            eps=norm.eps,
            flags=linear.flags | norm.flags,
        )
    return None


def _fuse_addition(
    norm: LayerNorm[Operand], done: list[Step], readers: Counter[int]
) -> LayerNorm[Operand]:
    """Fuse the addition just before a layer norm into it."""
    if not done or not _has_one_reader(norm.x, readers):
        return norm
    addition = done[-1]
    if not isinstance(addition, Add) or addition.y != norm.x:
        return norm
    for given in (addition.a, addition.b):
        # The result may replace a term, row by row.
        if given.block == norm.y.block != 0 and given.address != norm.y.address:
            return norm
    done.pop()
    return norm.replace(x=addition.a, delta=addition.b)


def _fuse_heads(
    attention: Attention[Operand], done: list[Step], readers: Counter[int]
) -> Attention[Operand]:
    """Fuse the rotations of q and k into attention, and the head norms before them."""
    producers = _head_producers(attention, done, readers)
    q, k, v = (producers.get(name) for name in ("q", "k", "v"))
    if not isinstance(q, Rope) or not isinstance(k, Rope):
        return attention
    v_stride = v.x_stride if isinstance(v, Copy) else attention.kv_stride
    if (q.cos, q.sin) != (k.cos, k.sin) or k.x_stride != v_stride:
        return attention
    fused = attention.replace(
        q=q.x,
        k=k.x,
        v=v.x if isinstance(v, Copy) else attention.v,
        q_stride=q.x_stride,
        kv_stride=k.x_stride,
        cos=q.cos,
        sin=q.sin,
    )
    if not fused.has_distinct_outputs():
        return attention
    _remove(done, producers.values())
    return _fuse_head_norms(fused, done, readers)


def _head_producers(
    attention: Attention[Operand], done: list[Step], readers: Counter[int]
) -> dict[str, Rope[Operand] | Copy[Operand]]:
    """The rotations of q and k just before attention, and the copies of k and v."""
    inputs = {"q": attention.q, "k": attention.k, "v": attention.v}
    producers: dict[str, Rope[Operand] | Copy[Operand]] = {}
    for step in reversed(done[-4:]):
        if isinstance(step, Rope):
            names = ("q", "k")
        elif isinstance(step, Copy):
            names = ("k", "v")
        else:
            break
        name = next((name for name in names if inputs[name] == step.y), None)
        if name is None or not _has_one_reader(step.y, readers):
            break
        producers[name] = step
    return producers


def _fuse_head_norms(
    attention: Attention[Operand], done: list[Step], readers: Counter[int]
) -> Attention[Operand]:
    """Fuse the head norms of q and k if both are present with the same eps."""
    norms = {step.y: step for step in done[-2:] if isinstance(step, RmsNorm)}
    q = norms.get(attention.q)
    k = None if attention.k is None else norms.get(attention.k)
    if q is None or k is None or (q.eps, q.flags) != (k.eps, k.flags):
        return attention
    if {q.head_width, k.head_width} != {attention.head_width}:
        return attention  # norms of all heads together
    sole = _has_one_reader(q.y, readers) and _has_one_reader(k.y, readers)
    if not sole or q.weight is None or k.weight is None:
        return attention
    if k.x_stride != attention.kv_stride:
        return attention
    fused = attention.replace(
        q=q.x,
        k=k.x,
        q_stride=q.x_stride,
        kv_stride=k.x_stride,
        q_norm=q.weight,
        k_norm=k.weight,
        eps=q.eps,
        flags=attention.flags | q.flags,
    )
    if not fused.has_distinct_outputs():
        return attention
    _remove(done, (q, k))
    return fused


def _remove(done: list[Step], steps: Iterable[Step]) -> None:
    removed = {id(step) for step in steps}
    done[:] = [step for step in done if id(step) not in removed]
