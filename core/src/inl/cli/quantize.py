"""``inl quantize``: writes a model's file or folder with quantized matrices."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.progress import loading_bar
from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.convert.write_gguf import Written

Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]
Out = Annotated[
    Path, typer.Argument(help="File that ends in .gguf, or a folder of safetensors.")
]
Source = Annotated[str, typer.Argument(help="Model folder, GGUF file or name.")]


def run(
    model: Source,
    out: Out,
    kind: Annotated[
        str,
        typer.Option(
            help="For GGUF: q4_0, q4_k_m, q5_k_m, q6_k, q8_0, f16, bf16 or f32. For a "
            "folder: fp8, int8 or int4."
        ),
    ],
    imatrix: Annotated[
        Path | None,
        typer.Option(help="Importance matrix of llama-imatrix, for GGUF."),
    ] = None,
    allow_requantize: Annotated[
        bool,
        typer.Option(
            "--allow-requantize",
            help="Accept a model that is quantized; its errors are added.",
        ),
    ] = False,
    force: Force = False,
    as_json: arguments.Json = False,
) -> None:
    """Quantize MODEL once, and write it to OUT."""
    from inl.convert.compressed import KINDS as FOLDER_KINDS
    from inl.convert.gguf_kinds import KINDS as GGUF_KINDS

    is_gguf, kind = out.suffix == ".gguf", kind.lower()
    accepted = GGUF_KINDS if is_gguf else FOLDER_KINDS
    if kind not in accepted:
        raise RequestError(
            f"--kind: found {kind!r:.40} for {out}, accepted: {', '.join(accepted)}"
            + ("" if is_gguf else "; or an OUT that ends in .gguf")
        )
    if not is_gguf and (imatrix is not None or allow_requantize):
        name = "--imatrix" if imatrix is not None else "--allow-requantize"
        raise RequestError(f"{name}: found {kind}, accepted: an OUT that is GGUF")
    began = time.perf_counter()
    written = write(model, out, kind, imatrix, force=force, requantize=allow_requantize)
    show(written, began, as_json=as_json)


def write(
    model: str,
    out: Path,
    kind: str | None,
    imatrix: Path | None = None,
    *,
    dtype: str | None = None,
    force: bool,
    requantize: bool,
) -> Written:
    """Write a model as GGUF or as a folder, by the name of ``out``.

    dtype: of the floats of a folder. Raises :class:`~inl.errors.ModelError`.
    """
    from inl.checkpoints.files.new_file import check_target
    from inl.checkpoints.gguf.checkpoint import GgufCheckpoint
    from inl.checkpoints.gguf.imatrix import read_imatrix
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.convert.gguf_source import source_of_gguf, source_of_model
    from inl.convert.write_folder import write_folder
    from inl.convert.write_gguf import write_gguf
    from inl.executor.checkpoint_formats import open_checkpoint
    from inl.executor.model_loader import read_model

    importance = None if imatrix is None else read_imatrix(imatrix)
    checkpoint = open_checkpoint(resolve_model(model))
    check_target(out, checkpoint.path, force=force)
    progress = loading_bar(f"writing {out.name}")
    if out.suffix != ".gguf":
        language = read_model(checkpoint)
        return write_folder(language, out, kind=kind, dtype=dtype, progress=progress)
    if isinstance(checkpoint, GgufCheckpoint):
        source = source_of_gguf(checkpoint.path)
    else:
        source = source_of_model(read_model(checkpoint))
    return write_gguf(
        source, out, kind, importance=importance, requantize=requantize,
        progress=progress,
    )  # fmt: skip


def show(written: Written, began: float, *, as_json: bool) -> None:
    """Print what was written, and the errors of its matrices."""
    report, seconds = written.quantization, time.perf_counter() - began
    if as_json:
        facts: dict[str, Any] = {
            "path": str(written.path),
            "bytes": written.bytes,
            "kind": report.dtype,
            "matrices": len(report.layers),
            "rms_error": report.rms_error,
            "largest_error": report.error,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(facts, ensure_ascii=False))
        return
    print(f"{written.path}: {written.bytes / 1e6:,.1f} MB in {seconds:.1f} s")
    if report.layers:
        print(report.describe())
