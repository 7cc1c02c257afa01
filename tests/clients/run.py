"""Runs client programs from PyPI and npm against ``inl serve``, and prints a table.

    python tests/clients/run.py                 # all of them: minutes, and 3 GB
    python tests/clients/run.py ollama litellm
    python tests/clients/run.py --list

Each script in ``scripts`` names its packages (PEP 723, or a line ``// npm:``), gets an
environment of its own with them, and prints a line for each of its cases. The
environments stay in ``--folder`` for the next run; the server has the default model.
Exit status 1 if a case fails, 3 if packages cannot be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.append(str(Path(__file__).parents[1] / "support"))
from http_servers import ServerProcess  # noqa: E402

HEADER = re.compile(r"^# /// script\n((?:#.*\n)*?)# ///$", re.MULTILINE)
NPM = re.compile(r"^// npm: (.*)$", re.MULTILINE)
CASE = re.compile(r"^case (\w+) (.*)$", re.MULTILINE)
NAMES = sorted(
    path.name
    for path in SCRIPTS.iterdir()
    if path.suffix in (".py", ".mjs", ".sh") and path.stem != "cases"
)
CLIENTS = {
    re.sub("_(python|program|calls)$", "", Path(name).stem): name for name in NAMES
}


class NotInstalled(Exception):
    """Packages of a client could not be installed."""


@dataclass
class Result:
    """What a script printed: its cases, each with "ok" or why it failed."""

    client: str
    script: str
    versions: str = ""
    cases: dict[str, str] = field(default_factory=dict)
    output: str = ""

    @property
    def failed(self):
        return [name for name, result in self.cases.items() if result != "ok"]

    def row(self):
        """Return the row of the table."""
        cases = ", ".join(
            name if result == "ok" else f"**{name} failed**"
            for name, result in self.cases.items()
        )
        return f"| {self.client} | {self.versions} | {cases} | `{self.script}` |"


def requirements(script):
    """Return the packages that a script names, and whether they are npm's."""
    text = (SCRIPTS / script).read_text("utf-8")
    if found := NPM.search(text):
        return found[1].split(), True
    found = HEADER.search(text)
    lines = found[1].splitlines() if found else ()
    header = tomllib.loads("\n".join(line.removeprefix("#")[1:] for line in lines))
    return header.get("dependencies", []), False


def call(*words, **options):
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, **options
    )
    if done.returncode:
        raise NotInstalled(f"{words[0]}: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


def clean():
    """Return the variables of a client's process: nothing of this environment."""
    drop = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in drop}


def installed(client, folder):
    """Return the command of a client's script, and its versions; installs packages."""
    script = CLIENTS[client]
    packages, is_npm = requirements(script)
    place = folder / client
    place.mkdir(parents=True, exist_ok=True)
    done = place / f"installed {' '.join(packages)}".replace("/", "_")
    if script.endswith(".sh"):
        return ["bash", SCRIPTS / script], call("curl", "--version").split()[1]
    if is_npm:
        if shutil.which("npm") is None:
            raise NotInstalled("needs npm")
        if not done.exists():
            call("npm", "install", "--no-audit", "--no-fund", *packages, cwd=place)
            done.touch()
        # Node looks for packages beside a script.
        for path in SCRIPTS.glob("*.mjs"):
            shutil.copy(path, place)
        listed = call("npm", "ls", "--depth=0", cwd=place)
        found = [
            re.search(rf"(?<!\S){re.escape(name)}@(\S+)", listed) for name in packages
        ]
        versions = [match[1] for match in found if match]
        return ["node", place / script], versions[0]
    python = place / "bin" / "python"
    if not done.exists():
        # Without this checkout and its environment.
        call(sys.executable, "-m", "venv", "--clear", place)
        if packages:
            pip = (python, "-m", "pip", "install", "-q", "--no-compile")
            call(*pip, *packages, env=clean())
        done.touch()
    if not packages:
        return [python, SCRIPTS / script], "by hand"
    names = [re.split(r"[\[<>=]", name)[0] for name in packages]
    code = f"from importlib.metadata import version as v\nprint(*map(v, {names[:1]!r}))"
    return [python, SCRIPTS / script], call(python, "-c", code, env=clean()).strip()


def run(client, url, folder, model="default"):
    """Run a client's script against a server; returns its :class:`Result`.

    Raises :class:`NotInstalled`.
    """
    command, versions = installed(client, folder)
    result = Result(client, CLIENTS[client], versions)
    done = subprocess.run(
        [*map(str, command), url, model],
        capture_output=True, text=True, env=clean(), timeout=900, check=False,
    )  # fmt: skip
    result.cases = dict(CASE.findall(done.stdout))
    result.output = done.stdout + done.stderr
    if done.returncode and not result.failed:
        result.cases["start"] = f"failed: {done.stderr.strip()[-300:]}"
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("client", nargs="*", help="of --list; all by default")
    parser.add_argument("--list", action="store_true", help="print the names")
    default = Path(tempfile.gettempdir()) / "inl-clients"
    parser.add_argument("--folder", type=Path, default=default, help="environments")
    parser.add_argument("--url", help="of a server that runs; its model is 'default'")
    given = parser.parse_args()
    if given.list:
        print(*CLIENTS, sep="\n")
        return 0
    if unknown := set(given.client) - CLIENTS.keys():
        parser.error(f"found {min(unknown)!r}, accepts {', '.join(CLIENTS)}")
    status, results = 0, []

    def run_all(url):
        nonlocal status
        for client in given.client or CLIENTS:
            try:
                result = run(client, url, given.folder)
            except NotInstalled as error:
                print(f"{client}: not installed: {error}", file=sys.stderr)
                status = status or 3
                continue
            results.append(result)
            print(result.row(), flush=True)
            if result.failed:
                status = 1
                print(result.output, file=sys.stderr)

    print("| client | version | cases | script |\n|---|---|---|---|")
    if given.url:
        run_all(given.url)
    else:
        with ServerProcess() as server:
            run_all(server.url)
    return status


if __name__ == "__main__":
    sys.exit(main())
