"""A kernel's name says what runs: each instruction of a step is of a native kernel.

What a kernel emits is recorded while a step is: instructions of the native library, and
computations of NumPy, which a kernel may use unnamed for integers and for copies only.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

import inl.spec.dispatch
from explained_kernels import SIZES, compute, language
from inl import EngineConfig
from inl.executor.load_plan import configure
from inl.runners.local_runner import start_runner
from inl.spec.kernel import Kernel
from inl.weights.quantize.report import KINDS
from inl_cpu.command_emitter import CommandEmitter

OPTIONS = {
    "plain": {},
    "float32": {"dtype": "float32"},
    "adapters": {"max_adapters": 2, "max_adapter_rank": 4},
    "cache": {"kv_dtype": "int8"},
    "invariant": {"invariant": True},
    **{kind: {"quantize": kind} for kind in KINDS},
}


class Emitted:
    """What each kernel has emitted: label -> kinds of computations."""

    def __init__(self):
        self.kernels, self.used = {}, {}
        self._running, self._copying = [], False

    def note(self, kind):
        if self._running and not self._copying:
            self.used[self._running[-1]].add(kind)

    def noting(self, kernel):
        self.kernels[kernel.label] = kernel

        def call(*args, **attrs):
            self._running.append(kernel.label)
            self.used.setdefault(kernel.label, set())
            try:
                return kernel.run(*args, **attrs)
            finally:
                self._running.pop()

        return call

    def false_names(self):
        """Return what kernels use that they do not name, and the other way round."""
        wrong = []
        for label, used in self.used.items():
            named = set(self.kernels[label].technologies)
            computes = used - {"integers"}
            instead = used and not computes and "native" in named
            if named - {"native", "numpy"} or computes - named or instead:
                wrong.append(f"{label} uses {sorted(used)}")
        return wrong


@pytest.fixture
def emitted():
    """Record what kernels emit that are resolved and called meanwhile."""
    seen = Emitted()
    emit, python, copied = (
        getattr(CommandEmitter, name) for name in ("emit", "python", "copied")
    )

    def emitting(self, instruction):
        seen.note("native")
        emit(self, instruction)

    def computing(self, run, inputs):
        floats = any(np.issubdtype(np.asarray(x).dtype, np.floating) for x in inputs)
        seen.note("numpy" if floats else "integers")
        python(self, run, inputs)

    def copying(self, x):
        seen._copying = True
        try:
            return copied(self, x)
        finally:
            seen._copying = False

    with ExitStack() as stack:
        for owner, name, value in (
            (CommandEmitter, "emit", emitting), (CommandEmitter, "python", computing),
            (CommandEmitter, "copied", copying),
            (inl.spec.dispatch, "noting", seen.noting),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        yield seen


@pytest.mark.parametrize("name", OPTIONS)
def test_each_computation_of_a_step_is_of_what_its_kernel_names(name, backend, emitted):
    config = EngineConfig(backend="cpu", context=64, **OPTIONS[name])
    runner = start_runner(configure(language(), config), backend, config)
    for tokens, rows in SIZES:
        compute(runner, tokens, rows)
        runner.reset()
    runner.close()
    assert not emitted.false_names()
    ops = {"attend", "linear", "reduce_add_norm", "sample"}
    native = {label for label, used in emitted.used.items() if "native" in used}
    assert ops <= {label.partition("/")[0] for label in native}
    assert "make_step/numpy_in_place" in emitted.used
    if name != "adapters":  # which integers select
        rows = {label for label in emitted.used if label.startswith("take_rows/")}
        assert rows == {"take_rows/native"}


@pytest.mark.parametrize(("name", "used"), [
    ("native", {"numpy"}), ("native", {"native", "numpy"}), ("numpy", {"native"}),
    ("native", {"integers"}), ("in_place", {"integers"}),
])  # fmt: skip
def test_a_false_name_is_found(name, used):
    seen = Emitted()
    kernel = Kernel("rope", name, print)
    seen.kernels[kernel.label], seen.used[kernel.label] = kernel, used
    assert seen.false_names()


def test_rows_of_integers_are_copied_by_numpy(backend):
    """The native instruction copies float32 only."""
    take = {
        kernel.name: kernel for kernel in backend.kernels() if kernel.op == "take_rows"
    }
    ids, rows = np.arange(6, dtype=np.int32).reshape(3, 2), np.array([2, 0], np.int32)
    assert "float32, found int32" in take["native"].refuse(ids, rows)
    assert take["native"].refuse(ids.astype(np.float32), rows) is None
    assert take["numpy"].run(ids, rows).tolist() == [[4, 5], [0, 1]]
    assert take["numpy"].invariant
