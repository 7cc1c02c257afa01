"""Passing state to a program that consumes it, without keeping a reference.

A framework that counts references writes to a buffer in place only if nothing else
refers to it, and copies it otherwise. While a program runs, the state is therefore
referenced by the program's own frames alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from traceback import clear_frames, walk_tb
from typing import Any, Final

from inl.errors import OutOfMemory, RunnerError
from inl.spec.cache import State
from inl.spec.step import Tables

NO_STATE: Final = State(
    caches=(), slotted={}, tables=Tables(**dict.fromkeys(Tables._fields))
)
"""Stands for a state that a program has consumed."""


def call_consuming(
    program: Callable[..., Any], args: tuple[Any, ...], take: Callable[[], State]
) -> Any:
    """Return ``program(*args, take())`` for one to three ``args``.

    The state is neither a local variable nor part of a tuple of this frame: the
    interpreter moves it from its stack to the parameter of a Python function. (A
    callable implemented in C borrows it, and the stack refers to it during the call.)
    """
    if len(args) == 1:
        return program(args[0], take())
    if len(args) == 2:
        return program(args[0], args[1], take())
    first, second, third = args
    return program(first, second, third, take())


def recovered_state(error: OutOfMemory) -> State:
    """Return the state of a program that ran out of memory before it consumed it.

    It is found among the arguments of the functions that the error has passed, whose
    variables are then cleared, so that a stored error does not refer to the state.
    Raises :class:`~inl.errors.RunnerError` if no function has it: it was consumed.
    """
    state = next(_states(error), None)
    _clear_variables(error)
    if state is None:
        raise RunnerError(
            f"program: has consumed its state and then raised OutOfMemory: {error}; a "
            "program that cannot restore its state raises it before it consumes any"
        ) from error
    return state


def _states(error: OutOfMemory) -> Iterator[State]:
    """Yield states among the arguments of the error's frames, outermost first."""
    from inspect import getargvalues

    for frame, _ in walk_tb(error.__traceback__):
        names, rest, _, values = getargvalues(frame)
        given = [values[name] for name in names if name in values]
        given += values.get(rest, ()) if rest else ()
        yield from (value for value in given if isinstance(value, State))


def _clear_variables(error: OutOfMemory) -> None:
    clear_frames(error.__traceback__)
    for frame, _ in walk_tb(error.__traceback__):
        # Before Python 3.13 a frame stores the dict that f_locals has returned.
        _ = frame.f_locals
