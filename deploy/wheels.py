"""Build the wheels of all packages for this system: ``python deploy/wheels.py dist``.

inl-cpu has the native kernels for every instruction set of this architecture; object
files are kept, so that only changed ones are compiled again. ``--record`` writes the
path of the folder into inl-core, for the commands of its errors and of ``inl doctor``:
pip keeps no record of ``--find-links``. A release is built without it. Further
arguments are those of ``pip wheel``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = "inl-cpu"
LEFT = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def projects() -> list[Path]:
    """Return the folders of the packages, the core first."""
    files = [
        *ROOT.glob("core/pyproject.toml"),
        *sorted(ROOT.glob("libs/*/pyproject.toml")),
        *sorted(ROOT.glob("plugins/*/pyproject.toml")),
    ]
    return [path.parent for path in files]


def build(output: Path, arguments: list[str], *, record: bool) -> list[Path]:
    """Replace the wheels in ``output``; returns their paths.

    A package is built from a copy without ``build``: setuptools would add what an older
    build left there. Raises ``CalledProcessError`` after pip has printed the reason.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "wheels"
        for project in projects():
            print(f"building {project.relative_to(ROOT)}", flush=True)
            source = project
            if project.name == NATIVE:
                # Its object files belong to this path.
                for pattern in ("lib*", "bdist*"):
                    for stale in (project / "build").glob(pattern):
                        shutil.rmtree(stale)
                compile_kernels(project, Path(temporary) / "libinl")
            else:
                source = Path(temporary) / project.name
                shutil.copytree(project, source, ignore=LEFT)
            if record and project.name == "core":
                text = f"{output.resolve()}\n"
                (source / "src/inl/wheel_folder.txt").write_text(text, "utf-8")
            words = ["wheel", "-q", "--no-deps", "-w", str(made), *arguments]
            subprocess.run([*PIP, *words, str(source)], check=True)
        for old in output.glob("inl_*.whl"):
            old.unlink()
        return sorted(Path(shutil.move(path, output)) for path in made.glob("*.whl"))


def compile_kernels(project: Path, output: Path) -> None:
    """Compile the object files of the native library, which shows progress: pip hides
    it.
    """
    script = project / "src" / "inl_cpu" / "build_native.py"
    if os.environ.get("INL_BUILD_NATIVE") != "0":
        words = [sys.executable, script, "--output", output]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--record", action="store_true")
    given, arguments = parser.parse_known_args()
    try:
        wheels = build(given.output, arguments, record=given.record)
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from error
    for path in wheels:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")
    print(f'install: pip install --find-links {given.output} "inl-core[cli]" inl-cpu')


if __name__ == "__main__":
    main()
