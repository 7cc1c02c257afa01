"""CUDA graphs of model steps: one launch in place of about a thousand.

A graph replays the same kernels on the same addresses. Therefore the message and other
inputs are copied to buffers of the graph, weights and state must be the captured
buffers, and results are copied out before the next replay overwrites them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, final

import torch

from inl.errors import KernelFailed
from inl.spec.tree import leaves, tree_map

WARM_UPS = 1
"""Runs before a capture, in which libraries allocate and choose their kernels."""

CAPTURES = threading.Lock()
"""Held while a graph is captured: engines of other threads capture theirs later."""

OTHERS_GO_ON = "thread_local"
"""Mode of captures in which other threads may allocate and wait for the device
meanwhile: an engine that serves while another one starts."""


@final
class AsyncHostCopy:
    """Asynchronous copy of a tensor to pinned host memory.

    Work that is enqueued on the device later does not delay it.
    """

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        self._event.synchronize()
        return self._host


@final
class CapturedStep:
    """``(weights, *inputs, state) -> (*results, state)``, captured at the first call.

    Later calls must pass the same weights and state, and inputs of the same shapes: a
    message, which may be in pinned host memory, and trees of tensors. A single result,
    which may be a tree, is meant for the host and is returned as
    :class:`AsyncHostCopy`; several results stay on the device, as copies. The first
    call warms up with zeroed inputs: an empty message writes to slot 0 and block 0
    only. Raises :class:`KernelFailed` where the function returns other state buffers
    than it took.
    """

    def __init__(self, function: Any, *, pool: Any = None) -> None:
        self._function = function
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Any, ...] = ()
        self._weights: Any = None
        self._state: Any = None
        self._addresses: tuple[int, ...] = ()
        self._results: tuple[Any, ...] = ()

    def __call__(self, weights: Any, *arguments: Any) -> tuple[Any, ...]:
        *inputs, state = arguments
        with torch.inference_mode():
            if self._graph is None:
                with CAPTURES:
                    self._graph = self._capture(weights, inputs, state)
            self._check(weights, state)
            pairs = zip(leaves(self._inputs), leaves(inputs), strict=True)
            for buffer, given in pairs:
                buffer.copy_(given, non_blocking=True)
            self._graph.replay()
            if len(self._results) == 1:
                return tree_map(AsyncHostCopy, self._results[0]), state
            return (*tree_map(_clone, self._results), state)

    def _capture(
        self, weights: Any, inputs: Sequence[Any], state: Any
    ) -> torch.cuda.CUDAGraph:
        place = next(leaves((weights, state, inputs))).device
        zeros = partial(torch.zeros_like, device=place)
        self._inputs = tuple(tree_map(zeros, each) for each in inputs)
        side = warm_up_stream(place)
        side.wait_stream(torch.cuda.current_stream(place))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._function(weights, *self._inputs, state)
        torch.cuda.current_stream(place).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=OTHERS_GO_ON):
            *results, after = self._function(weights, *self._inputs, state)
        if addresses(after) != addresses(state):
            raise KernelFailed(
                "cuda graph: the step returned other buffers of state than it took; "
                "its kernels must write in place"
            )
        self._weights, self._addresses = weights, addresses(state)
        self._results = tuple(results)
        return graph

    def _check(self, weights: Any, state: Any) -> None:
        if weights is self._weights and state is self._state:
            return
        if weights is not self._weights or addresses(state) != self._addresses:
            raise KernelFailed(
                "cuda graph: called with other weights or another state than it was "
                "captured with; capture again"
            )
        self._state = state


@cache
def warm_up_stream(device: torch.device) -> Any:
    """Return the stream of all runs before captures.

    One for a device: cuBLAS keeps 32 MiB of workspace for each stream that it has used.
    """
    # torch declares no types for the constructor.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _clone(leaf: Any) -> Any:
    """Clone a tensor, which the next replay overwrites; return other leaves as is."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def addresses(tree: Any) -> tuple[int, ...]:
    """Data pointers of the tensors of a tree."""
    return tuple(tensor.data_ptr() for tensor in leaves(tree))


@final
class CapturedByShape:
    """A program that is captured for each combination of shapes of its inputs.

    ``(weights, *inputs, state) -> (*results, state)``; see :class:`CapturedStep`. With
    a tensor of more than ``most`` rows it runs without a graph.
    """

    def __init__(self, function: Any, *, pool: Any = None, most: int) -> None:
        self._function, self._pool, self._most = function, pool, most
        self._steps: dict[tuple[torch.Size, ...], CapturedStep] = {}

    def __call__(self, weights: Any, *arguments: Any) -> tuple[Any, ...]:
        # The first input is a message, whose words are not rows.
        shapes = tuple(each.shape for each in leaves(arguments[:-1]))
        if any(shape[0] > self._most for shape in shapes[1:]):
            with torch.inference_mode():
                results: tuple[Any, ...] = self._function(weights, *arguments)
                return results
        if shapes not in self._steps:
            self._steps[shapes] = CapturedStep(self._function, pool=self._pool)
        return self._steps[shapes](weights, *arguments)


def capture(function: Any, *, pool: Any = None) -> CapturedStep:
    """Make a program of ``(weights, message, state) -> (*results, state)``.

    ``pool``, of :func:`torch.cuda.graph_pool_handle`, lets the graphs of a backend
    share memory, which is safe since they never run concurrently.
    """
    return CapturedStep(function, pool=pool)
