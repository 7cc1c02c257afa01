"""``inl doctor``: checks a machine or places and prints a fix for each problem."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from inl.cli import arguments
from inl.cli.checks import ORDER, Check, Status
from inl.cli.checks_machine import machine_checks
from inl.cli.checks_model import model_checks
from inl.cli.checks_packages import package_checks
from inl.cli.table import print_table


def run(
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=SIZE,...",
            help="Check the devices that would share a model, in place of this "
            "machine; a worker is started for each.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="First device of the placement, such as ray:cuda:0; without "
            "--placement the only one. [default: auto]"
        ),
    ] = None,
    model: arguments.Model = None,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds for workers to connect.")
    ] = 60.0,
    as_json: arguments.Json = False,
) -> None:
    """Check this machine or a placement, and print what fixes it.

    The exit code is 1 if the default model cannot run, or the placement not be used.
    """
    if placement is None and device is None:
        checks, subject = run_checks(), "the default model"
    else:
        checks, subject = _placement(placement, device, model, wait), "the placement"
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
        print(_summary(checks, subject))
    if failed:
        raise typer.Exit(1)


def run_checks() -> list[Check]:
    """Run all checks and sort them by severity."""
    return _sorted([*package_checks(), *machine_checks(), *model_checks()])


def _sorted(checks: list[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: ORDER.index(check.status))


def _placement(
    placement: str | None, device: str | None, model: str | None, wait: float
) -> list[Check]:
    from inl.cli.checks_placement import placement_checks
    from inl.config import EngineConfig

    config = EngineConfig(backend=device or "auto", placement=placement)
    return _sorted(placement_checks(config, model, wait))


def _cells(check: Check) -> tuple[str, str, str, str]:
    fix = f"try: {check.fix}" if check.fix else ""
    return check.status, check.subject, check.finding, fix


def _summary(checks: list[Check], subject: str) -> str:
    def count(status: Status, noun: str) -> str:
        number = sum(check.status == status for check in checks)
        return f"{number} {noun}{'' if number == 1 else 's'}"

    warnings = count("warn", "warning")
    if any(check.status == "wrong" for check in checks):
        return f"{subject} cannot run: {count('wrong', 'problem')}, {warnings}"
    return f"{subject} can run: {warnings}"
