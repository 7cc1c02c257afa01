"""Collectives of ranks on the native library: exchanges recorded between its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from inl.backend.collectives import Collectives
from inl.spec.op import Spec
from inl_cpu.tensor import plain

if TYPE_CHECKING:
    from inl.backend.peer_collectives import PeerCollectives
    from inl_cpu.command_emitter import CommandEmitter


@final
class RecordedCollectives(Collectives):
    """Verbs of :class:`~inl.backend.peer_collectives.PeerCollectives` in programs."""

    invariant = True

    def __init__(self, emitter: CommandEmitter, peers: PeerCollectives) -> None:
        self._emitter, self._peers = emitter, peers

    def size(self, axis: str) -> int:
        return self._peers.size(axis)

    def index(self, axis: str) -> int:
        return self._peers.index(axis)

    def all_reduce(self, x: Any, axis: str) -> Any:
        return self._of_rows(self._peers.all_reduce, x, axis, x.shape)

    def all_gather(self, x: Any, axis: str) -> Any:
        shape = *x.shape[:-1], x.shape[-1] * self.size(axis)
        return self._of_rows(self._peers.all_gather, x, axis, shape)

    def reduce_scatter(self, x: Any, axis: str) -> Any:
        shape = self._rows(x, axis, "reduce_scatter"), *x.shape[1:]
        return self._of_rows(self._peers.reduce_scatter, x, axis, shape)

    def gather_rows(self, parts: Sequence[Any], axis: str) -> tuple[Any, ...]:
        def rows(x: Any, axis: str) -> Any:
            return self._peers.gather_rows((x,), axis)[0]

        size = self.size(axis)
        shapes = [(x.shape[0] * size, *x.shape[1:]) for x in parts]
        return tuple(
            self._of_rows(rows, x, axis, shape)
            for x, shape in zip(parts, shapes, strict=True)
        )

    def all_to_all(self, x: Any, axis: str) -> Any:
        self._rows(x, axis, "all_to_all")
        return self._of_rows(self._peers.all_to_all, x, axis, x.shape)

    def send(self, x: Any, axis: str, target: int) -> None:
        source = plain(x)
        self._emitter.python(lambda: self._peers.send(source, axis, target), [source])

    def recv(self, spec: Spec, axis: str, source: int) -> Any:
        # Numbers of all floating dtypes are computed in float32.
        dtype = np.int32 if spec.dtype == "int32" else np.float32
        out = self._emitter.new(spec.shape, dtype)
        target = plain(out)

        def run() -> None:
            np.copyto(target, self._peers.recv(spec, axis, source))

        self._emitter.python(run, [])
        return out

    def barrier(self, axis: str) -> None:
        self._emitter.python(lambda: self._peers.barrier(axis), [])

    def _of_rows(
        self, verb: Callable[..., Any], x: Any, axis: str, shape: tuple[int, ...]
    ) -> Any:
        if self.size(axis) == 1:
            return x
        source = plain(x)
        out = self._emitter.new(shape, x.dtype)
        target = plain(out)
        self._emitter.python(lambda: np.copyto(target, verb(source, axis)), [source])
        return out
