"""Grammars are compiled in a child process first, which may crash or take too long.

``llguidance`` recurses as deep as a grammar refers, and takes time and memory without a
limit for some. What the child compiles within its limits is compiled in this process.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from inl.bounded_child import START_SECONDS, BoundedChild, describe_end
from inl.errors import RequestError
from inl.forks import on_fork
from inl.guidance.trial_process import CPU_SECONDS, MEMORY, STACK

PROGRAM: Final = "from inl.guidance.trial_process import main; main()"

ACCEPTED: Final = (
    f"accepted: a grammar that compiles in {CPU_SECONDS:g} s of processor time, "
    f"{MEMORY >> 20} MiB of memory and {STACK >> 20} MiB of stack"
)


class Trial(NamedTuple):
    """What a grammar took that compiles."""

    seconds: float
    """Processor time."""
    bytes: int
    """Address space of the process afterwards; 0 where it is unknown."""
    kept: int
    """Bytes of the compiled grammar; 0 where they are unknown."""


class GrammarTrials:
    """Compiles grammars in a child process, one at a time. Thread-safe.

    The process starts with the first grammar and serves all later ones until one ends
    it; a forked child of this process starts its own. tokens, special, ends: as of
    :class:`~inl.guidance.token_bytes.TokenBytes`.
    """

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]
    ) -> None:
        fields = {
            "tokens": [each.decode("latin-1") for each in tokens],
            "special": list(special),
            "ends": list(ends),
        }
        self._vocabulary = json.dumps(fields).encode() + b"\n"
        self._lock = threading.Lock()
        self._process: BoundedChild | None = None
        self._first_bytes = 0
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Leave the process, and the lock, to the parent's threads."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.disconnect()
            self._process = None

    def run(self, kind: str, text: str, where: str) -> Trial:
        """Try a grammar.

        where: prefix of error messages. Raises :class:`~inl.errors.RequestError` for a
        grammar that is malformed or exceeds a limit.
        """
        request = json.dumps([kind, text]).encode() + b"\n"
        with self._lock:
            reply = self._exchange(request, where)
        if "error" in reply:
            error = " ".join(str(reply["error"]).split())  # a regex has its place below
            raise RequestError(f"{where}: {error:.300}")
        return Trial(reply["seconds"], reply["bytes"], reply["kept"])

    def close(self) -> None:
        """End the process; a later :meth:`run` starts another."""
        with self._lock:
            if self._process is not None:
                self._process.stop()
                self._process = None

    def _exchange(self, request: bytes, where: str) -> dict[str, Any]:
        # After an interrupt, the reply must not be taken for the next one's: the
        # process is kept only once its reply has arrived.
        process, self._process = self._process, None
        if process is None or process.has_ended:
            process = self._open()
        process.send(request)
        reply: dict[str, Any] | None = process.receive()
        if reply is None:
            ending = describe_end(process.exit_status(), ACCEPTED)
            raise RequestError(f"{where}: its compilation failed: {ending}")
        used = reply.get("bytes", 0)
        self._first_bytes = self._first_bytes or used
        # What the library keeps counts towards the limit of the next grammar.
        if used > self._first_bytes + MEMORY // 4:
            process.stop()
        else:
            self._process = process
        return reply

    def _open(self) -> BoundedChild:
        try:
            process = BoundedChild(PROGRAM)
        except OSError as error:
            raise RequestError(
                f"structured: {sys.executable} cannot start: {error.strerror}"
            ) from error
        process.send(self._vocabulary)
        if process.receive(START_SECONDS) is None:
            raise RequestError(
                f"structured: {sys.executable} cannot import inl and llguidance in a "
                "process of its own, or lacks memory for the vocabulary"
            )
        self._first_bytes = 0
        return process
