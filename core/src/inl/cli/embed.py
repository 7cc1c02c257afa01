"""``inl embed``: embeddings of texts, a line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from inl.cli import arguments
from inl.cli.option_groups import EngineOptions, with_groups
from inl.cli.progress import loading_bar
from inl.errors import RequestError

BATCH = 32
"""Texts that are computed at a time."""


@with_groups
def run(
    *,
    model: Annotated[str, typer.Argument(help="Model folder, GGUF file or name.")],
    text: Annotated[
        list[str],
        typer.Argument(
            help='Texts; "-" is each line of standard input, "@FILE" each of a file.'
        ),
    ],
    engine_options: EngineOptions,
    context: arguments.Context = None,
    dimensions: Annotated[
        int | None, typer.Option(help="First elements of each embedding; all if none.")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="Prompt of sentence-transformers before texts.")
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Print the embedding of each TEXT as a line of JSON."""
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.engine.inference_engine import InferenceEngine

    texts = list(read_texts(text))
    config = engine_options.config(max_batch=min(BATCH, len(texts)), context=context)
    with InferenceEngine.from_pretrained(
        resolve_model(model), config, progress=loading_bar()
    ) as engine:
        rows: list[list[float]] = []
        for start in range(0, len(texts), BATCH):
            found = engine.embed(
                texts[start : start + BATCH],
                dimensions=dimensions,
                prompt_name=prompt_name,
            ).tolist()
            if as_json:
                rows += found
                continue
            for index, row in enumerate(found, start):
                print(json.dumps({"index": index, "embedding": row}), flush=True)
    if as_json:
        print(json.dumps({"model": model, "embeddings": rows}, ensure_ascii=False))


def read_texts(words: list[str]) -> Iterator[str]:
    """Yield the texts that arguments name; empty lines of files are left out.

    Raises :class:`RequestError` if a file cannot be read, or there are no texts.
    """
    count = 0
    for word in words:
        for text in _texts(word):
            count += 1
            yield text
    if not count:
        raise RequestError(
            f"TEXT: found no lines in {', '.join(words)}, accepted: at least one text"
        )


def _texts(word: str) -> Iterator[str]:
    if word != "-" and not word.startswith("@"):
        yield word
        return
    if word == "-":
        content = sys.stdin.read()
    else:
        try:
            content = Path(word[1:]).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{word}: {error}, accepted: a text file") from error
    yield from (line for line in content.splitlines() if line.strip())
