"""Attention over the paged cache, whose layout is the library's own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inl.errors import OutOfMemory
from inl.spec.kernel import Kernel
from inl_cpu.abi import Flag, Opcode
from inl_cpu.command_emitter import stride
from inl_cpu.memory import sparse_zeros

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl.spec.cache import Paged
    from inl.spec.step import Step
    from inl_cpu.command_emitter import Stage


CACHED = {"float32": Flag.X_EXACT, "bfloat16": Flag.KV_BF16, "int8": Flag.KV_INT8}
"""How a cache is told what it holds."""


class NativeCache:
    """Keys and values of one layer, in tiles of 16 keys; zeroed."""

    def __init__(self, stage: Stage, spec: Paged, blocks: int, block_size: int) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.kv_heads, self.head_dim = spec.kv_heads, spec.head_dim
        self.flags = int(CACHED[spec.dtype])
        size = stage.machine.library.inl_cache_bytes(
            blocks, block_size, spec.kv_heads, spec.head_dim, self.flags
        )
        assert size >= 0, f"no cache of {spec}"
        try:
            self.k, self.v = sparse_zeros(size), sparse_zeros(size)
        except MemoryError as error:
            raise OutOfMemory(
                f"cache: {2 * size} bytes do not fit; lower the number of blocks"
            ) from error


def write_kv(
    stage: Stage, k: Any, v: Any, cache: NativeCache, writes: Any
) -> NativeCache:
    k, v = _alike(stage, k, v)
    dims = [k.shape[0], cache.kv_heads, cache.head_dim, cache.block_size, stride(k)]
    data = [k, v, cache.k, cache.v, writes]
    stage.emit(Opcode.WRITE_KV, dims, data, flags=cache.flags)
    return cache


class Attention:
    """Attention by one way of summing: every token alone, or many in tiles."""

    def __init__(self, stage: Stage, flags: Flag) -> None:
        self._stage, self._flags = stage, int(flags)

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
        pair = _alike(self._stage, k, v)
        out = self._attend(q, pair, cache, step, scale, window, cap, group)
        return out, cache

    def _attend(
        self,
        q: Any,
        pair: tuple[Any, Any],
        cache: NativeCache,
        step: Step,
        scale: float,
        window: int | None,
        cap: float | None,
        group: int,
    ) -> Any:
        q, (k, v) = self._stage.dense(q), pair
        tokens, heads, _ = q.shape
        rows = step.lengths.shape[0]
        out = self._stage.new(q.shape)
        dims = [
            tokens, heads, cache.kv_heads, cache.head_dim, cache.block_size, rows,
            step.blocks.shape[2], window or 0, stride(q),
            0 if k is None else stride(k),
        ]  # fmt: skip
        data = [
            q, k, v, cache.k, cache.v, out, step.positions, step.rows, step.starts,
            step.lengths, step.blocks[group], step.writes[group],
        ]  # fmt: skip
        flags = cache.flags | self._flags
        flags |= int(Flag.ONE_EACH) if tokens == rows == 1 else 0
        reals = [scale, cap or 0.0]
        self._stage.emit(Opcode.ATTENTION, dims, data, reals, flags)
        return out


def _alike(stage: Stage, k: Any, v: Any) -> tuple[Any, Any]:
    """Keys and values with one distance between rows."""
    k, v = stage.dense(k), stage.dense(v)
    if stride(k) == stride(v):
        return k, v
    return _packed(stage, k), _packed(stage, v)


def _packed(stage: Stage, x: Any) -> Any:
    if x.flags.c_contiguous:
        return x
    out = stage.new(x.shape)
    width = out[0].size
    stage.emit(Opcode.COPY, [x.shape[0], width, stride(x), width], [x, out])
    return out


def kernels(stage: Stage) -> Iterable[Kernel]:
    """Alone and as one: rotation and norms of heads are folded in when recorded.

    Tiles of many tokens round otherwise than a token alone, so they are not invariant.
    """
    write = partial(write_kv, stage)
    yield Kernel("write_kv", "native", write, invariant=True)
    for name, flags in (("native", Flag.ANY_BITS), ("native_rows", Flag.X_EXACT)):
        alone = flags == Flag.X_EXACT
        found = Attention(stage, flags)
        for run in (found.attention, found.attend):
            yield Kernel(
                run.__name__, name, run, invariant=alone, preference=0 if alone else 1
            )
