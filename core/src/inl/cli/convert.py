"""``inl convert``: a model folder as a GGUF file, and a GGUF file as a folder."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from inl.cli import arguments
from inl.cli.quantize import Force, Out, Source, show, write
from inl.errors import RequestError

KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Kinds of GGUF files by the dtype of their matrices."""


def run(
    model: Source,
    out: Out,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the weights: float32, float16 or bfloat16. [default: as "
            "stored; bfloat16 for a folder of a quantized model]"
        ),
    ] = None,
    force: Force = False,
    as_json: arguments.Json = False,
) -> None:
    """Write MODEL to OUT in the other format.

    A GGUF file keeps its quantized matrices in a GGUF file only.
    """
    if dtype is not None and dtype not in KINDS:
        raise RequestError(
            f"--dtype: found {dtype!r:.40}, accepted: {', '.join(KINDS)}"
        )
    began = time.perf_counter()
    is_gguf = out.suffix == ".gguf"
    kind = KINDS[dtype] if dtype is not None and is_gguf else None
    written = write(model, out, kind, dtype=dtype, force=force, requantize=True)
    show(written, began, as_json=as_json)
