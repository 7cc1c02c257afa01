"""Checks of the frameworks that backends compute with; imports none of them.

An import takes seconds, and may crash. It is tried in a child process, for which a
probe waits a moment: most broken installations fail at once. A success is stored until
the framework changes; a slow failure is known to the next process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Final

from inl.errors import BackendUnavailable
from inl.exit_status import describe_exit
from inl.plugin.private_facts import module_key, read_facts
from inl.plugin.screening import CHILD

PATIENCE_SECONDS: Final = 0.1
"""Time that a probe waits for an import."""

FACTS: Final = {"reason": str}
"""Stored about an import: why it failed, or an empty string."""

LIMIT: Final = re.compile(r"(>=|<)([\d.]+)")


def require_framework(
    requirement: str, install: str, *, found: str | None = None
) -> None:
    """Raise :class:`BackendUnavailable` unless a framework can be used.

    requirement: module, which is also the name of its package, and accepted versions,
    such as "jax>=0.10,<0.11". install: the command that installs it. found: its
    version, if it is known; that of an installed package by default.
    """
    module = re.split("[>=<]", requirement, maxsplit=1)[0]
    if find_spec(module) is None:
        raise BackendUnavailable(f"{module} not installed. Try: {install}")
    found = found or installed_version(module)
    if found and not accepts(requirement, found):
        raise BackendUnavailable(
            f"found {module} {found}, needs {requirement}. Try: {install}"
        )
    if reason := import_failure(module):
        raise BackendUnavailable(f"cannot import {module}: {reason}. Try: {install}")


def require_modules(names: Iterable[str], install: str) -> None:
    """Raise :class:`BackendUnavailable` for modules that are not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"{' and '.join(missing)} not installed. Try: {install}"
        )


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, ``None`` if it has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        return None


def accepts(requirement: str, found: str) -> bool:
    """Return whether a requirement accepts a version, by its first three numbers."""
    return all(
        (numbers(found) < numbers(limit)) == (sign == "<")
        for sign, limit in LIMIT.findall(requirement)
    )


def numbers(text: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, such as (2, 13, 0)."""
    digits = [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]]
    return (*digits, 0, 0, 0)[:3]


def import_failure(module: str) -> str:
    """Return why a module cannot be imported; empty if it can, or is not known yet."""
    if module in sys.modules or CHILD in os.environ or not sys.executable:
        return ""
    key = module_key(module)
    stored = read_facts(key, FACTS)
    if stored is not None and not stored["reason"]:
        return ""
    reason = _tried(module, key)
    if reason is None:  # still running: it may be as slow to fail as the last one
        return str(stored["reason"]) if stored is not None else ""
    return reason


def _tried(module: str, key: str) -> str | None:
    """Import a module in a child process; return why that failed, ``None`` if it runs
    on.
    """
    import subprocess  # slow to import, and needed once per version

    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)  # noqa: PTH100
    script = Path(__file__).with_name("import_child.py")
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", script, module, key],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {CHILD: "1", "PYTHONPATH": path},
            start_new_session=True,  # it may outlive this process
        )
    except OSError:  # no processes here
        return ""
    try:
        output, _ = child.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        assert child.stdout is not None
        child.stdout.close()  # so that it stores a failure
        Thread(target=child.wait, name="inl-import", daemon=True).start()
        return None
    if child.returncode:
        return f"the process of its import {describe_exit(child.returncode)}"
    return output.decode("utf-8", "replace")
