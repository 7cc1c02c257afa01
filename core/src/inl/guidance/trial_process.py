"""The child process in which grammars are compiled first.

Protocol: one JSON value per line, first the vocabulary, then ``[kind, text]`` of
each grammar. A reply is ``{"seconds", "bytes", "kept"}`` of a grammar that compiles, or
``{"error"}``; the first one is ``{}``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from inl.bounded_child import (
    allow_kill_by_time,
    killed_after,
    limit_address_space,
    used_address_space,
)
from inl.guidance.c_heap import allocated_bytes
from inl.guidance.compiler import compile_matcher
from inl.guidance.token_bytes import TokenBytes

CPU_SECONDS: Final = 1.0
"""Processor time of a grammar: to compile it, and its first mask."""

MEMORY: Final = 256 << 20
"""Bytes of a grammar, beside what the process takes with its vocabulary."""

STACK: Final = 8 << 20
"""Bytes of stack: about 800 nested references."""


class Session:
    """A vocabulary, and the grammars that are tried with it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        import llguidance

        self._lib = llguidance
        tokens = [each.encode("latin-1") for each in fields["tokens"]]
        names = TokenBytes(tokens, fields["special"], fields["ends"])
        self._vocabulary = names.compile(llguidance)
        self._mask = (ctypes.c_int32 * ((len(tokens) + 31) // 32))()

    def try_grammar(self, kind: str, text: str) -> dict[str, Any]:
        """Compile a grammar as the parent will, and compute its first mask."""
        began = time.process_time()
        try:
            with killed_after(CPU_SECONDS):
                kept = self._run(kind, text)
        except BaseException as error:  # a panic of the library is no Exception
            return {"error": str(error) or type(error).__name__}
        return {
            "seconds": time.process_time() - began,
            "bytes": used_address_space(),
            "kept": kept,
        }

    def _run(self, kind: str, text: str) -> int:
        """Return the bytes that the compiled grammar takes."""
        before = allocated_bytes()
        initial = compile_matcher(self._lib, self._vocabulary, kind, text)
        matcher = initial.deep_copy()
        if matcher.is_stopped() or not matcher.compute_ff_tokens():
            address, size = ctypes.addressof(self._mask), ctypes.sizeof(self._mask)
            matcher.unsafe_compute_mask_ptr(address, size)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return max(0, allocated_bytes() - before)


def main() -> None:
    """Try grammars until standard input ends."""
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allow_kill_by_time()
    threading.stack_size(STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    lines = sys.stdin.buffer
    session = Session(json.loads(lines.readline()))
    limit_address_space(used_address_space() + MEMORY)
    reply: dict[str, Any] = {}
    while True:
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        if not (line := lines.readline()):
            return
        reply = session.try_grammar(*json.loads(line))
