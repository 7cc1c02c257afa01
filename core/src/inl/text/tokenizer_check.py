"""Trial of a tokenizer.json in a process with limits of memory and processor time.

``tokenizers`` parses a file without limits: a vocabulary of long pieces takes hundreds
of times its size, some rules never return, and some end the process. The trial parses
the file and encodes a few texts first, where that harms nobody.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any, Final

from inl.bounded_child import (
    BoundedChild,
    allow_kill_by_time,
    describe_end,
    killed_after,
    limit_address_space,
    used_address_space,
)
from inl.errors import CheckpointError

CPU_SECONDS: Final = 5
OVERHEAD: Final = 256 << 20
"""Bytes of memory of a trial beside 3 times the file."""

PROGRAM: Final = "from inl.text.tokenizer_check import main; main()"
SAMPLES: Final = tuple(
    (part * 4_000)[:4_000]
    for part in ("a", "1", " ", "\n", "é", "日本", "The quick brown fox! 42 ", "<|a_")
)
"""Texts that are encoded: runs of one kind of character, and plain prose."""


def try_tokenizer(text: bytes, where: str) -> None:
    """Raise :class:`CheckpointError` if a tokenizer.json is invalid or too costly."""
    child = BoundedChild(PROGRAM)
    child.send(text)
    child.end_input()
    reply = child.receive()
    if reply == "ok":
        child.stop()
        return
    most = (OVERHEAD + 3 * len(text)) >> 20
    accepted = (
        f"accepted: a tokenizer.json that loads, and encodes a text, in {CPU_SECONDS} "
        f"seconds and {most} MiB"
    )
    if reply is None:
        ending = describe_end(child.exit_status(), accepted)
        raise CheckpointError(f"{where}: its trial failed: {ending}")
    child.stop()
    raise CheckpointError(f"{where}: {reply}; {accepted}")


def main() -> None:
    """Load the tokenizer.json from standard input and print "ok" or the error."""
    text = sys.stdin.buffer.read()
    # The library prints the trace of a panic: standard error is discarded.
    from tokenizers import Tokenizer

    limit_address_space(used_address_space() + OVERHEAD + 3 * len(text))
    allow_kill_by_time()
    try:
        with killed_after(CPU_SECONDS):
            rules = Tokenizer.from_buffer(text)
            rules.no_truncation()
            rules.no_padding()
            for sample in SAMPLES:
                _encode(rules, sample)
        found = "ok"
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"[:300]
    sys.stdout.write(json.dumps(found) + "\n")


def _encode(rules: Any, text: str) -> None:
    """Encode a text. A missing character is no reason to refuse a vocabulary."""
    with suppress(Exception):
        rules.encode(text, add_special_tokens=False)
