"""``inl trace``: generate a completion and record all frames and replies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from inl.cli import arguments
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine


def run(
    prompt: Annotated[str, typer.Argument(help="Prompt text.")],
    out: Annotated[Path, typer.Option(help="Trace file to write.")],
    model: arguments.Model = None,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    quantize: arguments.Quantize = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of new tokens.")
    ] = 256,
    temperature: arguments.Temperature = 0.0,
    seed: arguments.Seed = None,
    raw: arguments.Raw = False,
) -> None:
    """Complete PROMPT and write a trace for `inl replay`."""
    config = EngineConfig(
        backend=device, dtype=dtype, quantize=quantize, max_batch=1, trace=out
    )
    with InferenceEngine.from_pretrained(model, config) as engine:
        ids = engine.tokenizer.encode(prompt) if raw else engine.chat_ids(prompt)
        pieces = engine.stream(
            ids, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        steps, where = engine.stats.steps, engine.device
    print(f"{steps} steps on {where} written to {out}", file=sys.stderr)
