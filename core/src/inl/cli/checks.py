"""Result of one check of ``inl doctor``."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["wrong", "warn", "ok"]
ORDER: tuple[Status, ...] = ("wrong", "warn", "ok")


class Check(NamedTuple):
    """One line of the report: the subject, the finding, and the fix."""

    status: Status
    """"wrong": the default model cannot run; "warn": needs attention."""
    subject: str
    finding: str
    fix: str = ""
    """A command or an instruction; empty if nothing is wrong."""
