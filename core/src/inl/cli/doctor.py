"""``inl doctor``: checks the machine and prints a fix for each problem."""

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
    """Check this machine and print what fixes its problems.

    The exit code is 1 if the default model cannot run.
    """
    checks = run_checks()
    failed = any(check.status == "wrong" for check in checks)
    if as_json:
        print(
            json.dumps(
                {"ok": not failed, "checks": [check._asdict() for check in checks]},
                ensure_ascii=False,
            )
        )
    else:
        print_table(
            ("", "check", "finding", "fix"), [_cells(check) for check in checks]
        )
        print(_summary(checks))
    if failed:
        raise typer.Exit(1)


def run_checks() -> list[Check]:
    """Run all checks and sort them by severity."""
    checks = [*package_checks(), *machine_checks(), *model_checks()]
    return sorted(checks, key=lambda check: ORDER.index(check.status))


def _cells(check: Check) -> tuple[str, str, str, str]:
    fix = f"try: {check.fix}" if check.fix else ""
    return check.status, check.subject, check.finding, fix


def _summary(checks: list[Check]) -> str:
    def count(status: Status, noun: str) -> str:
        number = sum(check.status == status for check in checks)
        return f"{number} {noun}{'' if number == 1 else 's'}"

    warnings = count("warn", "warning")
    if any(check.status == "wrong" for check in checks):
        return f"the default model cannot run: {count('wrong', 'problem')}, {warnings}"
    return f"the default model can run: {warnings}"
