"""Sampling fields that all dialects share, as the engine's options."""

from __future__ import annotations

from typing import Annotated, Protocol, cast

from msgspec import Meta

from inl.engine.options import GenerationOptions

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1)]
Temperature = Annotated[float, Meta(ge=0, le=1e6)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]

LEAST_TOP_P = 1e-6
"""Smallest ``top_p`` of the engine; the dialects accept any above 0."""


OPTIONAL = ("min_p", "presence_penalty", "frequency_penalty")


def optional_options(fields: object) -> GenerationOptions:
    """Return the options of the fields in ``OPTIONAL`` that a request has."""
    given = {name: getattr(fields, name) for name in OPTIONAL}
    present = {name: value for name, value in given.items() if value is not None}
    return cast("GenerationOptions", present)


class SamplingFields(Protocol):
    """A request with the fields of all dialects; ``None``: the default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None


def sampling_options(fields: SamplingFields) -> GenerationOptions:
    """Return the engine's options; ``None`` is the engine's default."""
    options: GenerationOptions = {"temperature": fields.temperature}
    if fields.top_p is not None:
        options["top_p"] = max(fields.top_p, LEAST_TOP_P)
    if fields.top_k is not None:
        options["top_k"] = max(fields.top_k, 0)  # -1 disables it in other servers
    return options
