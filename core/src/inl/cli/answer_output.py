"""Prints an answer while it is generated: wrapped on a terminal, as it is in a pipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from inl.cli.word_wrap import WordWrap

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.request_handle import RequestHandle

CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Control characters removed from output to a terminal."""


def print_answer(
    engine: InferenceEngine,
    handle: RequestHandle,
    on_text: Callable[[str], None] = lambda _: None,
) -> None:
    """Print the answer of a submitted request while it is generated.

    on_text: called with each new piece of it. Raises the error of the request. An
    exception cancels it, and what it has generated stays printed.
    """
    columns = shutil.get_terminal_size().columns
    wrap = WordWrap(columns) if sys.stdout.isatty() else None
    try:
        while True:
            if text := handle.take():
                on_text(text)
                shown = wrap(text.translate(CONTROL)) if wrap else text
                print(shown, end="", flush=True)
            if handle.completed:
                break
            engine.step()
        handle.completion()  # raises its error
    finally:
        engine.cancel(handle)
        if handle.finish_reason != "error":
            print(wrap.finish() if wrap else "", flush=True)


def truncation(handle: RequestHandle, prompt_tokens: int, context: int) -> str | None:
    """Return the line that reports a truncated answer; ``None`` for a complete one.

    context: the tokens of prompt and answer that the model accepts.
    """
    if handle.finish_reason != "length":
        return None
    count = len(handle.token_ids)
    full = prompt_tokens + count >= context
    reason = f"the context of {context} is full" if full else "--max-tokens"
    return f"[stopped at {count} token{'s'[: count != 1]}; {reason}]"
