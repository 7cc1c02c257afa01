"""Records what kernels use: launches of Triton and of CUDA C++, and ops of torch.

Launches of Triton and of CUDA C++ do not run: results are zeros, but which kernels
follow does not depend on data. Ops of torch run on the CPU.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from inl.backend.host import host_memory
from inl.device import Device
from inl.spec import dispatch
from inl_cuda import tuning
from inl_cuda.backend import CudaBackend
from inl_cuda.one_row import attention, products
from inl_cuda.one_row import kernels as one_row
from inl_torch.triton.precompile import suppress_launches

NAMES = """
    _reshape_alias _to_copy _unsafe_view alias as_strided cat chunk clone
    constant_pad_nd contiguous copy_ detach empty empty_like empty_strided expand
    expand_as fill_ flatten full full_like gather index index_copy_ index_put_
    index_select lift_fresh masked_fill_ narrow new_empty new_empty_strided new_full
    new_ones new_zeros ones ones_like pad permute repeat repeat_interleave reshape
    reshape_as resize_ scalar_tensor scatter_ select set_ slice slice_scatter split
    split_with_sizes squeeze stack t to transpose unbind unflatten unsqueeze view
    view_as where zero_ zeros zeros_like
"""
MOVES = frozenset(NAMES.split())
"""Ops that only allocate, move or convert numbers. Every other op that reads or writes
floating-point numbers computes; ops on integers alone make lists of work."""

OPERATORS = frozenset({"add", "sub", "mul", "rsub"})
"""Operators that models and bodies of composites apply to arrays themselves."""

CUDNN = "_scaled_dot_product_cudnn_attention"

OUTSIDE = "outside of kernels"


class Launches(TorchDispatchMode):
    """What each kernel has used: label -> technologies."""

    def __init__(self):
        super().__init__()
        self.used = {}
        self.ops = {}
        self.kernels = {}
        self._running = [OUTSIDE]

    def note(self, technology, what):
        label = self._running[-1]
        self.used.setdefault(label, set()).add(technology)
        self.ops.setdefault(label, set()).add(what)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == CUDNN:
            self.note("cudnn", name)
            q = args[0]
            return q.clone(), q.new_zeros(q.shape[:3], dtype=torch.float32)
        result = func(*args, **(kwargs or {}))
        if name not in MOVES and _has_floats((args, kwargs, result)):
            self.note("eager", name)
        return result

    def noting(self, kernel):
        """Return ``kernel.run``, to which its launches are attributed."""
        self.kernels[kernel.label] = kernel

        def call(*args, **attrs):
            self._running.append(kernel.label)
            self.used.setdefault(kernel.label, set())
            try:
                return kernel.run(*args, **attrs)
            finally:
                self._running.pop()

        return call

    def function_of(self, _file, name, *_):
        """Return a kernel in CUDA C++ that is not launched."""
        return SimpleNamespace(
            allow_shared=lambda _: None, allow_cluster=lambda *_: True,
            launch=lambda *_, **__: self.note("cuda", name),
        )  # fmt: skip

    def false_names(self):
        """Return what kernels use that they do not name, and the other way round."""
        outside = self.ops.get(OUTSIDE, set()) - OPERATORS
        wrong = [f"{outside} {OUTSIDE}"] if outside else []
        for label, kernel in self.kernels.items():
            if label not in self.used:
                continue
            used, named = self.used[label], set(kernel.technologies)
            spare = named - used - {"eager"} if len(named) == 1 else named - used
            # Which groups the weights have is known when they are loaded.
            either = {"cuda", "triton"} <= named and kernel.name.endswith("int4")
            if used - named or (spare and not (either and spare < {"cuda", "triton"})):
                wrong.append(f"{label} uses {sorted(used)}: {self.ops.get(label)}")
        return wrong


def backend_of(monkeypatch, major, minor):
    """Return the backend of a chip of this compute capability, in host memory."""
    place = SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
    for owner, name, value in (
        (torch.cuda, "get_device_capability", (major, minor)),
        (torch.cuda, "get_device_properties", place),
        (tuning, "shared_bytes", 232_448), (one_row, "can_compile", True),
        (CudaBackend, "memory", host_memory()),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda *_, value=value: value)
    monkeypatch.setattr(CudaBackend, "to_device", lambda _, x: x.clone())
    backend = object.__new__(CudaBackend)
    backend.device, backend.place = Device("cuda:0"), torch.device("cpu")
    return backend


def _has_floats(value):
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return False
    return any(map(_has_floats, value))


@contextmanager
def launches():
    """Record what the kernels use that are resolved and called within."""
    seen = Launches()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(suppress_launches({}))
        inner = JITFunction.run

        def run(self, *args, **options):
            seen.note("triton", self.fn.__name__)
            return inner(self, *args, **options)

        for owner, name, value in (
            (JITFunction, "run", run), (dispatch, "noting", seen.noting),
            (products, "function_of", seen.function_of),
            (attention, "function_of", seen.function_of),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(seen)
        yield seen
