"""Attention within whole sequences, in both directions, for encoders."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inl.spec.kernel import Kernel
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import FullAttention

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl.ops.full_attention import DistanceBias
    from inl_cpu.command_emitter import CommandEmitter


def full_attention(
    emitter: CommandEmitter, q: Any, k: Any, v: Any, starts: Any, *,
    scale: float, window: int | None,
) -> Any:  # fmt: skip
    return _attend(emitter, q, k, v, starts, scale, window=window)


def biased_attention(
    emitter: CommandEmitter, q: Any, k: Any, v: Any, starts: Any, w: DistanceBias, *,
    scale: float,
) -> Any:  # fmt: skip
    return _attend(emitter, q, k, v, starts, scale, bias=w.weight)


def _attend(
    emitter: CommandEmitter, q: Any, k: Any, v: Any, starts: Any, scale: float, *,
    window: int | None = None, bias: Any = None,
) -> Any:  # fmt: skip
    q, k, v = (emitter.dense(x) for x in (q, k, v))
    tokens, heads, width = q.shape
    out = emitter.new(q.shape)
    if not out.size:
        return out
    emitter.emit(
        FullAttention(
            tokens=tokens,
            heads=heads,
            kv_heads=k.shape[1],
            head_width=width,
            sequences=starts.shape[0] - 1,
            window=0 if window is None else window + 1,
            distances=0 if bias is None else bias.shape[0] // 2,
            q_stride=stride(q),
            k_stride=stride(k),
            v_stride=stride(v),
            q=q,
            k=k,
            v=v,
            starts=starts,
            bias=bias,
            y=out,
            scale=scale,
        )
    )
    return out


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Attention with and without a bias by distance, batch-invariant."""
    for run in (full_attention, biased_attention):
        yield Kernel(run.__name__, "native", partial(run, emitter), invariant=True)
