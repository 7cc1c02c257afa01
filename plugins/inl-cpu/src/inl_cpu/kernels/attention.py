"""Attention over the paged KV cache in the native layout."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import E4M3
from inl.errors import OutOfMemory
from inl.spec.kernel import Kernel
from inl_cpu import instructions
from inl_cpu.abi import Flag
from inl_cpu.command_emitter import stride
from inl_cpu.memory import sparse_zeros
from inl_cpu.tensor import plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from inl.ops.sink_attention import Sinks
    from inl.spec.cache import Paged
    from inl.spec.step import Step
    from inl_cpu.command_emitter import CommandEmitter


KV_FLAGS = {
    "float32": Flag.X_EXACT, "bfloat16": Flag.KV_BF16, "int8": Flag.KV_INT8,
    E4M3: Flag.KV_FLOAT8,
}  # fmt: skip
"""Instruction flag of each cache dtype."""


class NativeCache:
    """Keys and values of one layer, in tiles of 16 keys; initially zero."""

    def __init__(
        self, emitter: CommandEmitter, spec: Paged, layer: int, blocks: int,
        block_size: int,
    ) -> None:  # fmt: skip
        self.blocks, self.block_size = blocks, block_size
        self.kv_heads, self.head_dim = spec.kv_heads, spec.head_dim
        self.flags = int(KV_FLAGS[spec.dtype])
        self.scales: NDArray[np.float32] | None = None
        if spec.dtype == E4M3:
            self.scales = np.array(spec.layer_scales()[layer], np.float32)
        size = emitter.machine.library.inl_cache_bytes(
            blocks, block_size, spec.kv_heads, spec.head_dim, self.flags
        )
        assert size >= 0, f"no native cache for {spec}"
        try:
            self.k, self.v = sparse_zeros(size), sparse_zeros(size)
        except MemoryError as error:
            raise OutOfMemory(
                f"cache: {2 * size} bytes do not fit; lower the number of blocks"
            ) from error


def write_kv(
    emitter: CommandEmitter, k: Any, v: Any, cache: NativeCache, writes: Any
) -> NativeCache:
    k, v = _equal_strides(emitter, k, v)
    emitter.emit(
        instructions.WriteKv(
            rows=k.shape[0],
            heads=cache.kv_heads,
            head_width=cache.head_dim,
            block_size=cache.block_size,
            kv_stride=stride(k),
            k=k,
            v=v,
            k_cache=cache.k,
            v_cache=cache.v,
            writes=writes,
            scales=cache.scales,
            flags=cache.flags,
        )
    )
    return cache


class Attention:
    """Attention kernels, batch-invariant or with faster tiles of many tokens."""

    def __init__(self, emitter: CommandEmitter, flags: Flag) -> None:
        self._emitter, self._flags = emitter, int(flags)

    def attention(
        self,
        q: Any,
        cache: NativeCache,
        step: Step,
        *,
        scale: float,
        window: int | None,
        cap: float | None,
        group: int,
    ) -> Any:
        return self._attend(q, (None, None), cache, step, scale, window, cap, group)

    def sink_attention(
        self,
        q: Any,
        cache: NativeCache,
        step: Step,
        w: Sinks,
        *,
        scale: float,
        window: int | None,
        group: int,
    ) -> Any:
        return self._attend(
            q, (None, None), cache, step, scale, window, None, group, w.logits
        )

    def span_attention(
        self,
        q: Any,
        cache: NativeCache,
        step: Step,
        spans: Any,
        *,
        scale: float,
        window: int | None,
        cap: float | None,
        group: int,
    ) -> Any:
        """What a token sees are the keys from one position to another."""
        first, last = (self._emitter.new(step.positions.shape, "int32") for _ in "ab")
        given = [plain(x) for x in (step.positions, spans, first, last)]

        def run() -> None:
            positions, bounds, start, end = given
            start[:] = 0 if window is None else np.maximum(positions - window + 1, 0)
            np.maximum(positions, bounds[:, 1] - 1, out=end)

        self._emitter.python(run, [step.positions, spans])
        seen = step._replace(positions=last)
        none = (None, None)
        return self._attend(
            q, none, cache, seen, scale, None, cap, group, first_keys=first
        )

    def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        cache: NativeCache,
        step: Step,
        *,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
        group: int = 0,
    ) -> tuple[Any, NativeCache]:
        kv = _equal_strides(self._emitter, k, v)
        out = self._attend(q, kv, cache, step, scale, window, cap, group)
        return out, cache

    def _attend(
        self,
        q: Any,
        kv: tuple[Any, Any],
        cache: NativeCache,
        step: Step,
        scale: float,
        window: int | None,
        cap: float | None,
        group: int,
        sinks: Any = None,
        first_keys: Any = None,
    ) -> Any:
        q, (k, v) = self._emitter.dense(q), kv
        tokens, heads, _ = q.shape
        rows = step.lengths.shape[0]
        out = self._emitter.new(q.shape)
        flags = cache.flags | self._flags
        flags |= int(Flag.ONE_TOKEN_ROWS) if tokens == rows == 1 else 0
        self._emitter.emit(
            instructions.Attention(
                tokens=tokens,
                heads=heads,
                kv_heads=cache.kv_heads,
                head_width=cache.head_dim,
                block_size=cache.block_size,
                rows=rows,
                table_width=step.blocks.shape[2],
                window=window or 0,
                q_stride=stride(q),
                kv_stride=0 if k is None else stride(k),
                q=q,
                k=k,
                v=v,
                k_cache=cache.k,
                v_cache=cache.v,
                y=out,
                positions=step.positions,
                token_rows=step.rows,
                starts=step.starts,
                lengths=step.lengths,
                blocks=step.blocks[group],
                writes=step.writes[group],
                sinks=sinks,
                scales=cache.scales,
                first_keys=first_keys,
                scale=scale,
                cap=cap or 0.0,
                flags=flags,
            )
        )
        return out


def _equal_strides(emitter: CommandEmitter, k: Any, v: Any) -> tuple[Any, Any]:
    """Keys and values with the same row stride; copies if necessary."""
    k, v = emitter.dense(k), emitter.dense(v)
    if stride(k) == stride(v):
        return k, v
    return _contiguous(emitter, k), _contiguous(emitter, v)


def _contiguous(emitter: CommandEmitter, x: Any) -> Any:
    if x.flags.c_contiguous:
        return x
    out = emitter.new(x.shape)
    width = out[0].size
    emitter.emit(
        instructions.Copy(
            rows=x.shape[0],
            width=width,
            x_stride=stride(x),
            y_stride=width,
            x=x,
            y=out,
        )
    )
    return out


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Cache writes, attention, and both fused; fusion adds rotation and head norms.

    AMX tiles of many tokens round otherwise than a single token, so that variant is not
    batch-invariant.
    """
    write = partial(write_kv, emitter)
    yield Kernel("write_kv", "native", write, invariant=True)
    for name, flags in (("native", Flag.BATCH_VARIANT), ("native_rows", Flag.X_EXACT)):
        invariant = flags == Flag.X_EXACT
        family = Attention(emitter, flags)
        for run in (
            family.attention, family.attend, family.sink_attention,
            family.span_attention,
        ):  # fmt: skip
            yield Kernel(
                run.__name__,
                name,
                run,
                invariant=invariant,
                preference=0 if invariant else 1,
            )
