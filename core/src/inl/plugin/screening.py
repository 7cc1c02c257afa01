"""Imports each plugin in a child process first: one that hangs or crashes is a reason.

The result is stored in the cache until the plugin changes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Thread
from time import monotonic, time

from inl.bounded_json import parse_object
from inl.exit_status import describe_exit, kill_group, read_output
from inl.plugin.discover import Origin
from inl.plugin.private_facts import plugin_key, read_facts, write_facts
from inl.plugin.rows import is_named_for

LIMIT_SECONDS = 10.0
"""Time limit of a plugin's import and hooks."""

START_SECONDS = 30.0
"""Most seconds until a child's limit begins: it has to start and to import the core."""

REMEMBERED_SECONDS = 3600.0
"""A plugin that hangs or crashes is imported again after this time, or if it changes:
the cause may have been a driver or a busy machine."""

CHILD = "INL_SCREENING"
"""Environment variable of the child process, in which no other child is started."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the import of a plugin did in a child process."""

    reason: str = ""
    """Why the plugin must not be imported here; empty if it may be."""
    where: str = ""
    """End of the child's stderr: where it hangs or crashes."""
    backends: tuple[str, ...] = ()
    """Device types that it registers."""
    kernels: bool = True
    """Whether it may register kernels for device types of other plugins."""
    commands: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Commands that it registers, and their summaries."""
    seconds: float = 0.0
    """Duration of the import and the hooks."""
    when: float = 0.0
    """Time of the import, in seconds since 1970."""

    def relevant(self, kind: str) -> bool:
        """Whether a process that uses only devices of ``kind`` needs the plugin."""
        return kind in self.backends or self.kernels


TYPES = {
    "reason": str,
    "where": str,
    "backends": list,
    "kernels": bool,
    "commands": dict,
    "seconds": float,
    "when": float,
}
"""Types of the fields of :class:`Verdict` in JSON."""


def recall(origin: Origin) -> Verdict | None:
    """Return the stored verdict of a plugin, if it is unchanged since."""
    facts = read_facts(plugin_key(origin), TYPES)
    if facts is None:
        return None
    verdict = Verdict(**{**facts, "backends": tuple(map(str, facts["backends"]))})
    return None if verdict.reason and not _is_recent(verdict.when) else verdict


def _is_recent(when: float) -> bool:
    return 0 <= time() - when < REMEMBERED_SECONDS


class Child:
    """A running child process that imports one plugin."""

    def __init__(self, origin: Origin) -> None:
        import subprocess  # not needed by most processes, and slow to import

        self.origin = origin
        self._began = monotonic()
        path = os.pathsep.join(os.path.abspath(part) for part in sys.path)  # noqa: PTH100
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inl.plugin.screen_child", origin.module,
             str(LIMIT_SECONDS)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {CHILD: "1", "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C in a terminal is not for this process
        )  # fmt: skip

    def verdict(self) -> Verdict:
        """Wait for the result and store it."""
        # The child ends itself, and writes where it hangs. It may have started slowly.
        left = max(self._began + LIMIT_SECONDS - monotonic(), 0) + START_SECONDS
        with self._process as process:  # closes its pipes
            try:
                output, errors, hangs = read_output(process, left)
            except BaseException:
                kill_group(process)
                raise
        verdict = self._read(output, errors, hangs)
        with suppress(OSError):
            write_facts(plugin_key(self.origin), asdict(verdict))
        return verdict

    def _read(self, output: bytes, errors: bytes, hangs: bool) -> Verdict:
        where = errors[-2000:].decode("utf-8", "replace")
        try:
            facts = parse_object(output, "the process")
            return Verdict(
                str(facts["reason"]),
                where if facts["reason"] else "",
                tuple(map(str, facts.get("backends", ()))),
                bool(facts.get("kernels", True)),
                {str(k): str(v) for k, v in facts.get("commands", {}).items()},
                float(facts["seconds"]),
                time(),
            )
        except (ValueError, KeyError, TypeError):
            reason = self._failure(hangs or "Timeout (" in where)
            return Verdict(reason, where, when=time())

    def _failure(self, hangs: bool) -> str:
        if hangs:
            return f"import took over {LIMIT_SECONDS:g} s"
        return f"the process of its import {describe_exit(self._process.returncode)}"


def screen(origins: Iterable[Origin], kind: str = "") -> dict[Origin, Verdict | None]:
    """Return the verdict of each plugin; ``None`` for one that is not known yet.

    Plugins without a stored verdict are imported in child processes, at the same time.
    kind: wait only for plugins that serve this device type by name; the others are
    imported in the background, and known to the next process.
    """
    verdicts: dict[Origin, Verdict | None] = {}
    waiting: list[Child] = []
    for origin in origins:
        stored = Verdict() if _is_trusted(origin) else recall(origin)
        if stored is not None:
            verdicts[origin] = stored
            continue
        try:
            child = Child(origin)
        except OSError:  # no processes here: import it without a test
            verdicts[origin] = Verdict()
            continue
        verdicts[origin] = None
        if kind and not is_named_for(origin, kind):
            Thread(target=child.verdict, name="inl-screening", daemon=True).start()
        else:
            waiting.append(child)
    verdicts |= {child.origin: child.verdict() for child in waiting}
    for origin, verdict in verdicts.items():
        if verdict is None:
            logging.getLogger("inl").info(
                "%s: not used by this process: its first import is being tested", origin
            )
    return verdicts


def _is_trusted(origin: Origin) -> bool:
    """Whether importing a plugin here cannot do harm, or nothing can be tested."""
    return (
        bool(origin.problem or origin.module.partition(":")[0] in sys.modules)
        or not sys.executable
        or CHILD in os.environ
    )
