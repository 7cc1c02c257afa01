"""Faults of rare steps and of capabilities: ``inl check`` finds each and names it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from inl.backend.bandwidth import Bandwidth
from inl.backend.base import (
    ContextLengths,
    ForkSafety,
    PackedKernels,
    StorageDtypes,
    Traits,
    WeightUpdates,
)
from inl.backend.provisional import DeviceLoops
from inl.backend.reference import body_kernel, while_loop
from inl.backend.simple import plain_state
from inl.backend.tunable import Facts, Tunable
from inl.errors import OutOfMemory, RequestError
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.tree import leaves
from planted_kernels import failures, target_of, tensor

TRAITS = Traits(dtypes=("float32",), block_size=8, depth=2, readers=4)


def offering(*capabilities, **fields):
    return target_of(capabilities=capabilities, traits=TRAITS, **fields)


def message_of(target, section, name):
    """The message of the only failed check whose name begins so."""
    (found,) = failures(target, section, name)
    return found.first.message


def in_place(old, new):
    old[...] = tensor(new)
    return old


class Configs(Tunable):
    """Tiles of a product; ``wrong`` is the tile whose last row is lost."""

    def __init__(self, wrong=0, accepts=False):
        self.wrong, self.accepts = wrong, accepts

    def facts(self):
        return Facts("d", "1", "2", "p 0.1")

    def search_space(self, op, *_specs, **_attrs):
        return [({"rows": 1}, {"rows": 4}, {"rows": 8})] if op == "linear" else []

    def kernel(self, op, config):
        if "rows" not in config and not self.accepts:
            raise RequestError("unknown config")

        def run(x, w):
            y = x @ w.weight.T
            y = y if w.bias is None else y + w.bias
            if config["rows"] == self.wrong:
                y[-1] = 0
            return y

        return Kernel(op, "tiled", run, config=config)


class Measured(Bandwidth):
    def __init__(self, found):
        self.found = found

    def bytes_per_second(self):
        return self.found


def storing(*, is_right):
    """A capability that opens the device in bfloat16, or forgets to."""
    from inl.backend.reference import ReferenceBackend
    from inl.device import Device

    def open_in(dtype):
        kind = dtype if is_right else "float32"
        return ReferenceBackend(Device("planted:0"), dtype=kind)

    return StorageDtypes(("bfloat16",), open_in)


RIGHT = {
    "weights": WeightUpdates(in_place),
    "bandwidth": Measured(5e9),
    "context lengths": ContextLengths(lambda _: [16, 32]),
    "fork": ForkSafety(),
    "tunable": Configs(),
    "packed kernels": PackedKernels(list),
    "storage dtypes": storing(is_right=True),
}
WRONG = {
    "weights": [
        (WeightUpdates(lambda old, _new: old), "other contents than the new data"),
        (WeightUpdates(lambda _old, new: tensor(new).T), "shape"),
    ],
    "bandwidth": [(Measured(0), "found 0"), (Measured(float("inf")), "found inf")],
    "context lengths": [(ContextLengths(lambda _: [16.0]), "found 16.0")],
    "tunable": [(Configs(accepts=True), "accepted an unknown config")],
    "packed kernels": [
        (PackedKernels(lambda: [Kernel("linaer", "x", len)]), "did you mean 'linear'"),
        (PackedKernels(lambda: [Kernel("linear", "planted", len)]), "listed twice"),
    ],
    "storage dtypes": [(storing(is_right=False), "storing('bfloat16')")],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_capability_passes(name):
    assert failures(offering(RIGHT[name]), "backend", f"backend/{name}") == []


@pytest.mark.parametrize(
    ("name", "wrong", "says"), [(key, *each) for key in WRONG for each in WRONG[key]]
)
def test_a_wrong_capability_is_named(name, wrong, says):
    assert says in message_of(offering(wrong), "backend", f"backend/{name}")


def test_a_replacement_that_overtakes_what_was_begun_is_found():
    """Products are computed late, on what the weight holds by then."""

    class Late:
        def __init__(self, make):
            self.make = make

        @property
        def shape(self):
            return self.make().shape

    def numpy(x):
        from inl.dtypes import wrap

        return wrap(x.make() if isinstance(x, Late) else x)

    def kernels():
        for op in catalog().values():
            if not op.composite:
                run = body_kernel(op, "float32")
                late = lambda *a, run=run, **k: Late(partial(run, *a, **k))  # noqa: E731
                yield Kernel(op.name, "late", late if op.name == "linear" else run)

    from inl.device import Device
    from inl.plugin import simple_backend
    from inl.testing.target import Target

    make = simple_backend(
        tensor=tensor, numpy=numpy, kernels=kernels, traits=TRAITS,
        capabilities=[WeightUpdates(in_place)],
    )  # fmt: skip
    target = Target(Device("planted:0"))
    vars(target)["backend"] = make(target.device)
    found = message_of(target, "backend", "backend/weights")
    assert "begun before the replacement is that of other weights" in found


def _full(target):
    found = replace(target, full=True)
    vars(found)["backend"] = target.backend
    return found


def test_a_wrong_config_is_found_by_a_full_check():
    right, wrong = (_full(offering(Configs(wrong=wrong))) for wrong in (0, 8))
    assert failures(right, "backend", "backend/tunable") == []
    found = message_of(wrong, "backend", "backend/tunable")
    assert "linear/tiled" in found
    assert "{'rows': 8}" in found


def test_a_child_that_waits_for_a_thread_of_its_parent_is_found(monkeypatch):
    from inl.testing import capability_checks

    monkeypatch.setattr(capability_checks, "FORK_SECONDS", 1.0)
    asked, done = threading.Semaphore(0), threading.Semaphore(0)

    def serve():
        while True:
            asked.acquire()
            done.release()

    threading.Thread(target=serve, daemon=True).start()

    def with_thread(run):
        def linear(x, w):
            asked.release()
            done.acquire()
            return run(x, w)

        return linear

    target = offering(ForkSafety(), kernels=wrapping("linear", with_thread))
    assert "did not end in 1 s" in message_of(target, "backend", "backend/fork")


def wrapping(name, wrap_run):
    def kernels():
        for op in catalog().values():
            if not op.composite:
                run = body_kernel(op, "float32")
                yield Kernel(
                    op.name, "planted", wrap_run(run) if op.name == name else run
                )

    return kernels


def test_a_tensor_that_threads_share_while_they_load_is_found():
    buffer, barrier = np.zeros(64 * 48, np.float32), threading.Barrier(4)

    def shared(host):
        found = tensor(host)
        if found.size != buffer.size:
            return found
        buffer[:] = found.ravel()
        try:
            barrier.wait(0.2)
        except threading.BrokenBarrierError:
            barrier.reset()
        return buffer.reshape(found.shape).copy()

    from inl.device import Device
    from inl.dtypes import wrap
    from inl.plugin import simple_backend
    from inl.testing.target import Target

    make = simple_backend(
        tensor=shared, numpy=wrap, kernels=wrapping("linear", lambda run: run),
        traits=TRAITS,
    )  # fmt: skip
    target = Target(Device("planted:0"))
    vars(target)["backend"] = make(target.device)
    assert "4 threads at the same time" in message_of(
        target, "backend", "backend/readers"
    )
    assert failures(offering(), "backend", "backend/readers") == []


def test_a_state_that_is_too_large_has_an_error_of_its_own():
    def state(spec, limits):
        if limits.blocks[0] > 1 << 30:
            raise ValueError("allocation failed: -12")
        return plain_state(spec, limits, tensor)

    found = message_of(target_of(state=state), "backend", "backend/out of memory")
    assert "found raised ValueError: allocation failed: -12" in found
    assert "expected inl.errors.OutOfMemory" in found


def compiling(change):
    """Return compile; change: (function, arguments) -> result of a step's program."""

    def compile_program(function, _bucket, _consumes, info):
        if info.name != "advance":
            return function
        return lambda *arguments: change(function, arguments)

    return compile_program


def translated(function, arguments):
    try:
        return function(*arguments)
    except OutOfMemory as error:
        raise RuntimeError("device error 2") from error


def swallowed():
    last = []

    def run(function, arguments):
        try:
            last[:] = [function(*arguments)]
        except OutOfMemory:
            tokens, _ = last[0]
            return tokens, arguments[-1]
        return last[0]

    return run


def spoiled(function, arguments):
    try:
        return function(*arguments)
    except OutOfMemory:
        for leaf in leaves(arguments[-1].caches):
            leaf[...] = 0
        raise


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (translated, "and the runner RuntimeError: device error 2"),
        (swallowed(), "do not catch it"),
        (spoiled, "after a step that raised OutOfMemory: "),
    ],
)
def test_a_step_without_memory_that_breaks_others_is_found(change, says):
    kernels = wrapping("write_kv", in_place_write)
    target = target_of(kernels, compile=compiling(change))
    assert says in message_of(target, "runner", "runner/out of memory")


def in_place_write(_run):
    def write_kv(k, v, cache, writes):
        at = np.divmod(writes, cache.k.shape[1])
        cache.k[at], cache.v[at] = k, v
        return cache

    return write_kv


def loops(change=lambda name, run: run):
    class Arrays:
        def __getattr__(self, name):
            return change(name, getattr(np, name))

    return DeviceLoops(while_loop, Arrays())


def once(_condition, body, value):
    return body(value)


def swapped_where(name, run):
    return (lambda c, a, b: run(c, b, a)) if name == "where" else run


def inclusive_cumsum(name, run):
    return (lambda *a, **k: run(*a, **k) * 0) if name == "cumsum" else run


def test_repeated_steps_pass_in_one_program_and_one_by_one():
    for target in (offering(loops()), offering()):
        assert failures(target, "runner", "runner/repeated") == []


@pytest.mark.parametrize(
    "wrong",
    [
        DeviceLoops(once, np),
        loops(swapped_where),
        loops(inclusive_cumsum),
    ],
    ids=["once", "where", "cumsum"],
)
def test_a_wrong_loop_is_named(wrong):
    found = message_of(offering(wrong), "runner", "runner/repeated")
    assert "repeated step" in found
    assert "DeviceLoops" in found or "computed in one program" in found


def test_a_program_of_one_context_length_is_named():
    """The program of 512 tokens forgets the last block of its table."""

    def compile_program(function, _bucket, _consumes, info):
        if info.context != 512:
            return function

        def program(weights, message, state):
            return function(weights, message, state)

        return program

    right = offering(ContextLengths(lambda _: [512]), compile=compile_program)
    assert failures(right, "runner", "runner/context") == []

    def short(run):
        def make_step(message, tables, **attrs):
            step, tables = run(message, tables, **attrs)
            if step.lengths.max() > 512:
                step = step._replace(lengths=np.minimum(step.lengths, 8))
            return step, tables

        return make_step

    target = offering(
        ContextLengths(lambda _: [512]), kernels=wrapping("make_step", short)
    )
    found = message_of(target, "runner", "runner/context")
    assert "grows from the program of 512 tokens to that of 1200" in found


def test_a_cache_that_outlives_its_runner_is_found():
    kept = []

    def state(spec, limits):
        made = plain_state(spec, limits, tensor)
        kept.append(made.caches)
        return made

    target = target_of(wrapping("write_kv", in_place_write), state=state)
    found = message_of(target, "runner", "runner/closed")
    assert "caches of a runner that was closed are in use" in found
    assert failures(target_of(), "runner", "runner/closed") == []
