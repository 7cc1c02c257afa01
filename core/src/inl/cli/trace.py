"""``inl trace``: generate a completion and record all frames and replies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from inl.cli import arguments
from inl.cli.answer_output import print_answer, truncation
from inl.cli.option_groups import SamplingOptions, SpeculativeOptions, with_groups
from inl.cli.prompt_input import read_prompt


@with_groups
def run(
    *,
    prompt: arguments.Prompt = None,
    out: Annotated[Path, typer.Option(help="Trace file to write.")],
    model: arguments.Model = None,
    engine_options: SpeculativeOptions,
    sampling: SamplingOptions,
    raw: arguments.Raw = False,
) -> None:
    """Complete PROMPT and write a trace for `inl replay`."""
    from inl.engine.inference_engine import InferenceEngine

    options = sampling.generation_options()
    config = engine_options.config(max_batch=1, trace=out)
    text = read_prompt(prompt)
    with InferenceEngine.from_pretrained(model, config) as engine:
        ids = engine.tokenizer.encode(text) if raw else engine.chat_ids(text)
        handle = engine.submit(ids, **options)
        print_answer(engine, handle)
        if note := truncation(handle, len(ids), engine.context):
            print(note, file=sys.stderr)
        steps, where = engine.stats.steps, engine.device
    print(f"{steps} steps on {where} written to {out}", file=sys.stderr)
