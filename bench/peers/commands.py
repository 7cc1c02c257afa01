"""Run other programs: with a log, a limit and all their children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


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
    process = start_logged(command, log, environment=environment)
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise too_late(limit, log) from None
    finally:
        end_group(process)
    if process.returncode:
        raise ended(process.returncode, log)
    return out.decode("utf-8", "replace")


def start_logged(
    command: list[object],
    log: Path,
    *,
    stdin: int = subprocess.DEVNULL,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in a group of its own, its errors into ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )


def too_late(limit: float, log: Path) -> Failed:
    """Say that a program was past its limit."""
    return Failed(f"took more than {limit:.0f} s; see {log}")


def ended(code: int, log: Path) -> Failed:
    """Say how a program ended, with the log's last line."""
    return Failed(f"{_how_ended(code)}: {_last_line(log)}; see {log}")


def parse_line(out: str) -> dict[str, Any]:
    """Read the last line that a driver printed. Raises :class:`Failed`."""
    lines = out.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise Failed(f"the driver printed no JSON, but {out[-200:]!r}") from None
    if not isinstance(found, dict):
        raise Failed(f"the driver printed {lines[-1][:200]!r}, accepted: an object")
    return found


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and its children."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _how_ended(code: int) -> str:
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
