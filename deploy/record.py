"""Records how the documentation's own commands install and run INL.

    python deploy/record.py wheels     # from dist (make wheels), without a compiler
    python deploy/record.py source     # README's commands in a fresh clone: minutes
    python deploy/record.py gpu        # from dist, the checks of docs/gpu.md: NVIDIA

On a machine without an index, with torch installed and the other wheels in dist:

    PIP_NO_INDEX=1 python deploy/record.py gpu --beside "$(python -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')" --model FILE.gguf

Each runs in an empty folder with a home, a cache and an environment of its own, and
prints every command with its output, exit status and seconds. The commands are those of
the pages: one that changes there changes here. Exit status 1 if a command fails, or if
the model's answer is empty.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"

COMPILERS = re.compile(
    r"([\w.]+-)*(c\+\+|g\+\+|gcc|cc|clang|clang\+\+|cpp|c89|c99|ld|as|zig)(-[\d.]+)?"
)
"""Names of programs that a machine without a compiler does not have."""


def block(page: str, section: str) -> list[str]:
    """Return the commands of the first block of a section, without comments."""
    text = (ROOT / page).read_text("utf-8").partition(f"{section}\n")[2]
    found = re.search(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"{page}: has no commands behind {section!r}")
    lines = [re.sub(r"\s+# .*", "", line) for line in found[1].splitlines()]
    return [line for line in lines if line]


def wheels_line(backend: str) -> str:
    """Return the command of docs/install.md that installs a backend from wheels."""
    (line,) = (
        line for line in block("docs/install.md", "## From wheels")
        if line.endswith(f" {backend}")
    )  # fmt: skip
    return line


def without_compilers(folder: Path) -> str:
    """Return a PATH of links to all programs but compilers."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for path in Path(place).glob("*") if Path(place).is_dir() else ():
            link = folder / path.name
            if not COMPILERS.fullmatch(path.name) and not link.is_symlink():
                link.symlink_to(path)
    return str(folder)


def commands(
    kind: str, dist: Path, model: str = MODEL, beside: Path | None = None
) -> Iterator[str]:
    """Yield the commands of a recording.

    beside: a folder of packages that the environment has as well.
    """
    if kind == "source":
        yield f"git clone -q {shlex.quote(str(ROOT))} ."
        yield from block("README.md", "## Install")
        yield ".venv/bin/inl doctor"
        return
    backend = "inl-cpu" if kind == "wheels" else "inl-cuda"
    yield f"{shlex.quote(sys.executable)} -m venv .venv"
    if beside is not None:
        folder = f".venv/lib/python3.{sys.version_info[1]}/site-packages"
        yield f"echo {shlex.quote(str(beside))} > {folder}/beside.pth"
    line = wheels_line(backend).replace(" dist ", f" {shlex.quote(str(dist))} ")
    yield f".venv/bin/{line}"
    if kind == "gpu":
        for each in block("docs/gpu.md", "## 2. Check"):
            yield f".venv/bin/{each.replace('MODEL', shlex.quote(model))}"
        return
    yield ".venv/bin/inl doctor"
    yield f'.venv/bin/inl generate "{QUESTION}"'


def record(kind: str, lines: Iterable[str]) -> int:
    """Run commands and print what they print; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="inl-record-") as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        drop = ("PYTHONPATH", "VIRTUAL_ENV", "INL_CACHE", "CXX", "OMP_NUM_THREADS")
        env = {key: value for key, value in os.environ.items() if key not in drop}
        env |= {
            "HOME": name,
            "PIP_CACHE_DIR": f"{name}/pip",
            "INL_CACHE": f"{name}/inl",
        }
        if kind == "wheels":
            env["PATH"] = without_compilers(folder / "bin")
            found = shutil.which("c++", path=env["PATH"])
            print(f"# no compiler: c++ is {found}")
        for command in lines:
            print(f"$ {command}", flush=True)
            began = time.perf_counter()
            done = subprocess.run(
                command, shell=True, cwd=work, env=env, text=True, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            seconds = time.perf_counter() - began
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            print(*lines[-40:], f"[exit {done.returncode}, {seconds:.1f} s]", sep="\n")
            # Doctor's status is 1 for what may be missing beside: other devices.
            if done.returncode and " doctor" not in command:
                return 1
            if " generate " in command and not lines:
                print("the answer is empty")
                return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("wheels", "source", "gpu"))
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--model", default=MODEL, help="of gpu: a file or name")
    parser.add_argument("--beside", type=Path, help="a folder of installed packages")
    given = parser.parse_args()
    if given.kind != "source" and not list(given.dist.glob("inl_core-*.whl")):
        parser.error(f"{given.dist}: has no wheels; run `make wheels` first")
    dist = given.dist.resolve()
    lines = commands(given.kind, dist, given.model, given.beside)
    sys.exit(record(given.kind, lines))


if __name__ == "__main__":
    main()
