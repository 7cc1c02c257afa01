"""Compiles programs on a backend."""

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
    arguments, _, results = PROGRAMS[name].partition(" -> ")
    consumes = (arguments.count(","),) if "state" in results else ()
    width = table_width or limits.max_blocks_per_seq
    return ProgramInfo(
        name=name,
        limits=limits,
        bucket=bucket,
        consumes=consumes,
        context=width * limits.block_size,
    )


def compile_program(
    backend: Backend, function: Program, info: ProgramInfo
) -> Callable[..., Any]:
    """Compile a function to the program that ``info`` describes."""
    return backend.compile(function, info.bucket, consumes=info.consumes, info=info)


def takes_info(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter ``info``, or accepts any keyword."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable in C without a signature
        return False
    return any(
        each.name == "info" or each.kind is Parameter.VAR_KEYWORD for each in parameters
    )
