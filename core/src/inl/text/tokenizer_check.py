"""Trial of a tokenizer.json in a process with limits of memory and processor time.

``tokenizers`` parses a file without limits: a vocabulary of long pieces takes hundreds
of times its size, some rules never return, and some end the process. The trial parses
the file and encodes a few texts first, where that harms nobody.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from inl.errors import CheckpointError
from inl.exit_status import describe_exit

CPU_SECONDS: Final = 5
WAIT_SECONDS: Final = 120.0
"""Limit of the waiting time, on a busy machine."""
OVERHEAD: Final = 256 << 20
"""Bytes of memory of a trial beside 3 times the file."""

PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from inl.text.tokenizer_check import main; main()"
)
SAMPLES: Final = tuple(
    (part * 4_000)[:4_000]
    for part in ("a", "1", " ", "\n", "é", "日本", "The quick brown fox! 42 ", "<|a_")
)
"""Texts that are encoded: runs of one kind of character, and plain prose."""

ENDINGS: Final = {
    -signal.SIGABRT: "the library aborted, as it does without memory",
    -signal.SIGSEGV: "the library crashed",
    -9: f"took over {CPU_SECONDS} seconds of processor time",
}
"""Reasons by the signal that ended the process; 9 is SIGKILL."""


def try_tokenizer(text: bytes, where: str) -> None:
    """Raise :class:`CheckpointError` if a tokenizer.json is invalid or too costly."""
    folders = [each for each in sys.path if isinstance(each, str)]
    paths = json.dumps([*folders, str(Path(__file__).parents[2])]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROGRAM],
            input=paths + b"\n" + text,
            capture_output=True,
            timeout=WAIT_SECONDS,
            start_new_session=True,
            check=False,
        )
        reply = done.stdout.decode("utf-8", "replace")
        code = done.returncode
        exceeded = ENDINGS.get(code) or f"its process {describe_exit(code)}"
    except subprocess.TimeoutExpired:
        reply, exceeded = "", f"did not end in {WAIT_SECONDS:g} seconds"
    if reply == "ok":
        return
    most = (OVERHEAD + 3 * len(text)) >> 20
    raise CheckpointError(
        f"{where}: "
        + (reply or f"its trial failed: {exceeded}")
        + f"; accepted: a tokenizer.json that loads, and encodes a text, in "
        f"{CPU_SECONDS} seconds and {most} MiB"
    )


def main() -> None:
    """Load the tokenizer.json from standard input and print "ok" or the error."""
    text = sys.stdin.buffer.read()
    # The library prints the trace of a panic: standard error is discarded.
    from tokenizers import Tokenizer

    _limit(len(text))
    try:
        rules = Tokenizer.from_buffer(text)
        rules.no_truncation()
        rules.no_padding()
        for sample in SAMPLES:
            _encode(rules, sample)
        found = "ok"
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"[:300]
    sys.stdout.write(found)


def _encode(rules: Any, text: str) -> None:
    """Encode a text. A missing character is no reason to refuse a vocabulary."""
    with suppress(Exception):
        rules.encode(text, add_special_tokens=False)


def _limit(size: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    used = 0
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
    most = used + OVERHEAD + 3 * size
    with suppress(ValueError, OSError):  # macOS, where shared libraries count
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
