"""Runs a fuzzing worker and yields what it reports of each case."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

START_SECONDS = 300.0
CASE_SECONDS = 60.0
"""Time limit of a case: it would hang, on a slow and busy machine as well."""


def reports(worker, arguments, folder, first, last):
    """Yield the report of each case; of one that ended the worker, what it said last.

    The worker is started as ``WORKER *ARGUMENTS FIRST LAST`` and prints one line of
    JSON for each case. ``status`` is the exit status of a worker that ended.
    """
    command = [sys.executable, str(worker), *map(str, arguments)]
    said = folder / "said"
    while first < last:
        with (
            said.open("wb") as errors,
            subprocess.Popen(
                [*command, str(first), str(last)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            seconds, line = START_SECONDS, "\n"
            while first < last and line.endswith("\n"):
                timer = threading.Timer(seconds, process.kill)
                timer.start()
                line = process.stdout.readline()
                timer.cancel()
                first, seconds = first + 1, CASE_SECONDS
                if line.endswith("\n"):
                    yield json.loads(line)
        if not line.endswith("\n"):
            message = said.read_text("utf-8", "replace")[-1500:]
            yield {"result": "ended", "message": message, "status": process.returncode}
