"""Compiles programs on a backend, with or without the parameter ``info``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from inl.spec.program import PROGRAMS, ProgramInfo

if TYPE_CHECKING:
    from inl.backend.base import Backend, Program
    from inl.spec.limits import Limits
    from inl.spec.step import Bucket


def info_of(
    name: str, bucket: Bucket | None, limits: Limits, table_width: int | None = None
) -> ProgramInfo:
    """Return the description of a program.

    name: one of :data:`~inl.spec.program.PROGRAMS`. table_width: columns of the block
    tables that a step reads; ``None`` is all.
    """
    arguments = PROGRAMS[name].partition(")")[0].strip("(").split(", ")
    consumes = (arguments.index("state"),) if "state" in arguments else ()
    width = table_width or limits.max_blocks_per_seq
    return ProgramInfo(name, limits, bucket, consumes, width * limits.block_size)


def compile_program(
    backend: Backend, function: Program, info: ProgramInfo
) -> Callable[..., Any]:
    """Compile a function; contract 1.1 has no parameter ``info``."""
    more = {"info": info} if takes_info(backend.compile) else {}
    return backend.compile(function, info.bucket, consumes=info.consumes, **more)


def takes_info(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter ``info``, or accepts any keyword."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable in C without a signature
        return False
    return any(
        each.name == "info" or each.kind is Parameter.VAR_KEYWORD for each in parameters
    )
