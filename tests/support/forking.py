"""Runs code in a fresh process, which may fork: pytest's own threads forbid it here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SCRIPT_SECONDS = 300


def run_script(code, *arguments):
    """Run Python code in a new process; returns what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=SCRIPT_SECONDS)
    except BaseException:
        # Its children too, which may be what it waits for.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return output


def fork_all(count, work):
    """Fork children that each call ``work(index)``; returns a function that waits.

    The function returns the exit status of each child: 0 if ``work`` returned, 1 if it
    raised. A child ends like any program, with its exit handlers.
    """
    children = []
    for index in range(count):
        if (child := os.fork()) == 0:
            work(index)
            sys.exit(0)
        children.append(child)

    def wait():
        return [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]

    return wait
