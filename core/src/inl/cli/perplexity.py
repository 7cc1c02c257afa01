"""``inl perplexity``: how well a model predicts a text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from inl.cli import arguments
from inl.cli.option_groups import KernelOptions, with_groups
from inl.cli.progress import loading_bar
from inl.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.executor.model_loader import LanguageModel
    from inl.runners.local_runner import LocalRunner

CHUNK = 512
"""Default tokens of a chunk."""
STEP = 64
"""Tokens of a step, whose logits are in memory at the same time."""


class Perplexity(NamedTuple):
    """Perplexity over the tokens that were scored."""

    value: float
    error: float
    """Standard error, as if tokens were independent."""
    scored: int
    chunks: int


@with_groups
def run(
    *,
    model: Annotated[str, typer.Argument(help="Model folder, GGUF file or name.")],
    file: Annotated[Path, typer.Argument(help="Text file in UTF-8.")],
    kernel_options: KernelOptions,
    context: Annotated[
        int, typer.Option(help="Tokens of a chunk; the second half is scored.", min=4)
    ] = CHUNK,
    chunks: Annotated[
        int | None, typer.Option(help="Only the first chunks. [default: all]", min=1)
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Print the perplexity of MODEL on the text in FILE.

    The text is cut into chunks of --context tokens without overlap, and the tokens of
    the second half of each are scored, as llama-perplexity does.
    """
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.executor.model_loader import longest_context, open_model
    from inl.plugin import make_backend
    from inl.runners.local_runner import start_runner

    text = _read(file)
    language = open_model(resolve_model(model))
    if context > longest_context(language):
        raise RequestError(
            f"--context: found {context}, accepted: 4 to {longest_context(language)}, "
            f"the context of {language.name}"
        )
    pieces = chunks_of(language, text, context)[:chunks]
    config = kernel_options.config(max_batch=1, context=context, sampling="greedy")
    backend = make_backend(config.backend)
    runner = start_runner(language, backend, config, progress=loading_bar())
    dtype = runner.loaded.config.dtype
    try:
        found = perplexity(runner, pieces, progress=loading_bar("chunks"))
    finally:
        runner.close()
    if as_json:
        facts: dict[str, Any] = {
            "perplexity": found.value, "error": found.error, "scored": found.scored,
            "chunks": found.chunks, "context": context, "model": language.name,
            "device": str(backend.device), "dtype": dtype,
        }  # fmt: skip
        print(json.dumps(facts, ensure_ascii=False))
        return
    print(
        f"perplexity {found.value:.4f} ± {found.error:.4f} over {found.scored} tokens: "
        f"{found.chunks} chunks of {context}, the second half of each"
    )


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: {error}, accepted: a text file") from error


def chunks_of(language: LanguageModel, text: str, context: int) -> list[list[int]]:
    """Cut a text into chunks of ``context`` token ids; what is left over is dropped.

    Each begins with the token that begins a text, if the tokenizer adds one. Raises
    :class:`RequestError` for a text that is shorter than a chunk.
    """
    tokenizer = language.checkpoint.tokenizer()
    ids = tokenizer.encode(text)
    plain = len(tokenizer.encode(text, add_special=False))
    begins = ids[:1] if len(ids) > plain else []
    found = [
        [*begins, *ids[start + len(begins) : start + context]]
        for start in range(0, len(ids) - context + 1, context)
    ]
    if not found:
        raise RequestError(
            f"FILE: found {len(ids)} tokens, accepted: at least {context}, one chunk "
            "of --context"
        )
    return found


def perplexity(
    runner: LocalRunner,
    chunks: Sequence[Sequence[int]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Return the perplexity of the second half of each chunk of token ids."""
    import numpy as np

    losses: list[NDArray[np.float64]] = []
    for index, ids in enumerate(chunks, 1):
        first = len(ids) // 2
        for start, logits in _logits(runner, ids[:-1]):
            scored = logits[max(first - start, 0) :]
            stop = start + len(logits) + 1
            losses.append(log_losses(scored, ids[stop - len(scored) : stop]))
        if progress is not None:
            progress(index, len(chunks))
    every = np.concatenate(losses)
    mean = float(every.mean())
    value = math.exp(mean)
    spread = float(every.std(ddof=1)) if len(every) > 1 else 0.0
    error = value * spread / math.sqrt(len(every))
    return Perplexity(value, error, len(every), len(chunks))


def log_losses(logits: NDArray[Any], following: Sequence[int]) -> NDArray[np.float64]:
    """Return minus the log-probability of each token, from logits [T, V] before it."""
    import numpy as np

    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    chosen = wide[np.arange(len(following)), list(following)]
    return np.asarray(np.log(np.exp(wide).sum(1)) - chosen)


def _logits(
    runner: LocalRunner, ids: Sequence[int]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield position and logits of the tokens of each step of a new sequence."""
    from inl.dtypes import widen
    from inl.spec.message import Row, admit_frame, release_frame, step_frame
    from inl.spec.step import Bucket

    limits, slot = runner.limits, 1
    table = [list(range(1, 1 + limits.max_blocks_per_seq))] * limits.groups
    runner.submit(
        admit_frame(
            slot, table, groups=limits.groups,
            max_blocks_per_seq=limits.max_blocks_per_seq,
        )
    )  # fmt: skip
    for start in range(0, len(ids), STEP):
        part = list(ids[start : start + STEP])
        bucket = Bucket(tokens=len(part), rows=1, tokens_per_row=len(part))
        message = step_frame(
            bucket, [Row(slot, part)], step=start, groups=limits.groups,
            block_size=limits.block_size, decode_rows=0,
        )  # fmt: skip
        yield start, widen(runner.logits(message))
    runner.submit(
        release_frame(
            slot, groups=limits.groups, max_blocks_per_seq=limits.max_blocks_per_seq
        )
    )
