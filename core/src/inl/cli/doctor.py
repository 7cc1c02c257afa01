"""``inl doctor``: what is wrong with this machine, and the command that mends it."""

from __future__ import annotations

import json

import typer

from inl.cli import arguments
from inl.cli.checks import ORDER, Check, Status
from inl.cli.checks_machine import machine_checks
from inl.cli.checks_model import model_checks
from inl.cli.checks_packages import package_checks
from inl.cli.table import print_table


def run(
    as_json: arguments.Json = False,
) -> None:
    """Say what is wrong here, one line each; 1 if the default model cannot run."""
    checks = examine()
    stopped = any(check.status == "wrong" for check in checks)
    if as_json:
        print(
            json.dumps(
                {"ok": not stopped, "checks": [check._asdict() for check in checks]},
                ensure_ascii=False,
            )
        )
    else:
        print_table(("", "what", "found", "try"), [_cells(check) for check in checks])
        print(_verdict(checks))
    if stopped:
        raise typer.Exit(1)


def examine() -> list[Check]:
    """Look at everything; what stops the default model comes first."""
    checks = [*package_checks(), *machine_checks(), *model_checks()]
    return sorted(checks, key=lambda check: ORDER.index(check.status))


def _cells(check: Check) -> tuple[str, str, str, str]:
    return check.status, check.what, check.found, check.mend and f"try: {check.mend}"


def _verdict(checks: list[Check]) -> str:
    def count(status: Status) -> int:
        return sum(check.status == status for check in checks)

    if count("wrong"):
        return f"{count('wrong')} of {len(checks)} stop the default model"
    return f"the default model can run; {count('warn')} of {len(checks)} to look at"
