"""Programs in processes with limits, which report processor time and peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

PROGRAM = """
import json, resource, sys, time
from pathlib import Path
STATUS = Path("/proc/self/status")

def memory(field):
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def measured(work):
    from inl.errors import InlError
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS"), time.process_time()
    try:
        result, message = "read", repr(work())[:500]
    except InlError as error:
        result, message = "refused", f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    print(json.dumps([result, message, seconds, memory("VmHWM") - before]))

"""


class Outcome(NamedTuple):
    """What a program did: "read", "refused" with an error of ours, or "died"."""

    result: str
    message: str
    seconds: float
    """Processor time."""
    memory: int
    """Peak of the memory in bytes, beside that before."""


def run_limited(code: str, *args: object, seconds: float = 300.0) -> Outcome:
    """Call the function ``work`` that ``code`` defines, with ``sys.argv[1:]``."""
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{PROGRAM}{code}\nmeasured(work)\n",
                *map(str, args),
            ],
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Outcome("died", f"did not end in {seconds} seconds", seconds, 0)
    if done.returncode:
        return Outcome("died", f"{done.returncode}: {done.stderr[-1500:]}", 0.0, 0)
    return Outcome(*json.loads(done.stdout.splitlines()[-1]))
