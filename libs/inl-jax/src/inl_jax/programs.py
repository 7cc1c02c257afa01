"""Programs compiled ahead of time, several in parallel, with a cache on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import jax

from inl.backend.base import Program
from inl.errors import OutOfMemory
from inl.spec.step import Bucket

STEP_ARGUMENTS = 3
"""Arguments of a program ``(weights, message, state)``; the last is donated."""

OOM = "RESOURCE_EXHAUSTED"
"""Status in the message of XLA's error for a failed allocation."""

Key = tuple[Any, ...]


class Compilation:
    """A program that a thread compiles.

    ``result`` waits for it. A queue is used as it stays usable after an interrupt.
    """

    def __init__(self, jitted: Any, shapes: Any) -> None:
        self._jitted, self._shapes = jitted, shapes
        self._done: SimpleQueue[Any] = SimpleQueue()

    def run(self) -> None:
        """Compile; an error is raised by :meth:`result`."""
        try:
            self._done.put(self._jitted.lower(*self._shapes).compile())
        except Exception as error:
            self._done.put(error)

    def fits(self, shapes: Any) -> bool:
        """Whether it is compiled for arguments of these shapes."""
        return bool(self._shapes == shapes)

    def result(self) -> Any:
        """Wait for the compiled program; raises the error of the compiler."""
        done = self._done.get()
        if isinstance(done, Exception):
            raise done
        return done


class Compiler:
    """Compiles the programs of one backend.

    translate: makes the error to raise from one of XLA. spread: takes a function and
    the shapes of its arguments, and returns the function over several devices.
    """

    def __init__(
        self,
        translate: Callable[[Exception], Exception],
        spread: Callable[[Program, Any], Program] | None = None,
    ) -> None:
        self._translate = translate
        self._spread = spread
        self._started: dict[Key, Compilation] = {}

    def precompile(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Start to compile the functions of calls, in threads.

        Each call is a ``partial`` of a function to compile and the arguments of a step.
        The calls are not made. :meth:`step` waits for the program that it needs, so
        that the first programs run while the others are compiled.
        """
        waiting: SimpleQueue[Compilation] = SimpleQueue()
        count = 0
        for call in calls:
            assert isinstance(call, partial), "a call is a function and its arguments"
            bound = call.args[:-STEP_ARGUMENTS]
            function = partial(call.func, *bound, **call.keywords)
            shapes = shapes_of(call.args[-STEP_ARGUMENTS:])
            program = self.jitted(function, (STEP_ARGUMENTS - 1,), shapes)
            task = Compilation(program, shapes)
            self._started[key_of(function)] = task
            waiting.put(task)
            count += 1
        for _ in range(min(count, os.cpu_count() or 1)):
            Thread(target=_work, args=(waiting,), daemon=True).start()

    def step(self, function: Program, bucket: Bucket, consumes: Sequence[int]) -> Any:
        """Return the program of a bucket, which is compiled by its first call."""
        program: list[Any] = []

        def run(*args: Any) -> Any:
            if not program:
                program.append(self._compiled(function, consumes, args))
            return program[0](*args)

        return self.guarded(run, f"step of {bucket.tokens} tokens")

    def any_shape(self, function: Program, consumes: Sequence[int]) -> Program:
        """Return a program that is compiled for each shape of its arguments."""
        program: list[Any] = []

        def run(*args: Any) -> Any:
            if not program:
                program.append(self.jitted(function, consumes, shapes_of(args)))
            return program[0](*args)

        return self.guarded(run, "admission")

    def jitted(self, function: Program, consumes: Sequence[int], shapes: Any) -> Any:
        """Return the jitted function for arguments of these shapes."""
        spread = function if self._spread is None else self._spread(function, shapes)
        return jitted(spread, consumes)

    def guarded(self, program: Program, what: str) -> Program:
        """Wrap a program so that it raises the errors of the contract."""

        def run(*args: Any) -> Any:
            try:
                return program(*args)
            except Exception as error:
                if OOM not in str(error):
                    raise
                cause = error
            raise OutOfMemory(f"{what}: {self._translate(cause)}") from cause

        return run

    def _compiled(self, function: Program, consumes: Sequence[int], args: Any) -> Any:
        shapes = shapes_of(args)
        started = self._started.pop(key_of(function), None)
        if started is not None and started.fits(shapes):
            return started.result()
        return self.jitted(function, consumes, shapes).lower(*shapes).compile()


def _work(waiting: SimpleQueue[Compilation]) -> None:
    while not waiting.empty():
        waiting.get().run()


def jitted(function: Program, consumes: Sequence[int]) -> Any:
    """Return the jitted function, which donates the arguments it consumes."""
    return jax.jit(function, donate_argnums=tuple(consumes))


def shapes_of(arguments: Any) -> Any:
    """Return shape, dtype and place of each array; holds none of them."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(shape, arguments)


def key_of(function: Program) -> Key:
    """Return the identity of a step's function: its code, model and bucket."""
    assert isinstance(function, partial), "a step is a function of ops and a model"
    ops, *others = function.args
    return function.func, ops.bucket, *others, *sorted(function.keywords.items())


def use_disk_cache(folder: Path) -> None:
    """Keep compiled programs in a folder, unless JAX is configured to keep them."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
