"""Run other programs: with a log, a limit and all their children."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


class Failed(Exception):
    """Something a row needs could not be had; the message is the row's reason."""


def run_logged(
    command: list[object],
    log: Path,
    *,
    limit: float,
    environment: dict[str, str] | None = None,
) -> str:
    """Run a program, its errors into ``log``; gives what it printed.

    Raises :class:`Failed` with the log's last line. A program past ``limit`` seconds is
    ended with its children, so none of them disturbs the next measurement.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {limit:.0f} s; see {log}") from None
        finally:
            _end_group(process)
    if process.returncode:
        raise Failed(f"{_ended(process.returncode)}: {_last_line(log)}; see {log}")
    return out.decode("utf-8", "replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and its children."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _ended(code: int) -> str:
    """Say how a program ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        text = file.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # pip ends with advice; what went wrong stands in the line with the word.
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[-1][:300]
