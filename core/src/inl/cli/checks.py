"""What one look of ``inl doctor`` gives."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["wrong", "warn", "ok"]
ORDER: tuple[Status, ...] = ("wrong", "warn", "ok")


class Check(NamedTuple):
    """One line: what was looked at, what was found, and what mends it."""

    status: Status
    """"wrong": the default model cannot run; "warn": worth a look."""
    what: str
    found: str
    mend: str = ""
    """A command, or what to do; empty where nothing is wrong."""
