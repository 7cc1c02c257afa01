"""Command table; the module of a command is imported when the command runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

import inl
from inl.garbage_collection import gc_disabled

COMMANDS = {
    "generate": "inl.cli.generate:run",
    "devices": "inl.cli.devices:run",
    "plugins": "inl.cli.plugins:run",
    "explain": "inl.cli.explain:run",
    "plan": "inl.cli.plan:run",
    "chat": "inl.cli.chat:run",
    "serve": "inl.cli.serve:run",
    "models": "inl.cli.models:run",
    "quantize": "inl.cli.quantize:run",
    "convert": "inl.cli.convert:run",
    "perplexity": "inl.cli.perplexity:run",
    "embed": "inl.cli.embed:run",
    "ops": "inl.cli.ops:run",
    "doctor": "inl.cli.doctor:run",
    "bench": "inl.cli.bench:run",
    "bench-mix": "inl.cli.bench_mix:run",
    "bench-serve": "inl.cli.bench_serve:run",
    "run-batch": "inl.cli.run_batch:run",
    "pipe": "inl.cli.pipe:run",
    "tune": "inl.cli.tune:run",
    "completion": "inl.cli.completion:run",
    "trace": "inl.cli.trace:run",
    "replay": "inl.cli.replay:run",
    "check": "inl.cli.check:run",
    "new-plugin": "inl.cli.new_plugin:run",
}


class LazyGroup(TyperGroup):
    """Typer group that imports commands lazily from :data:`COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return all command names in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import one command; returns ``None`` for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        app = typer.Typer(add_completion=False, rich_markup_mode=_markup())
        app.command(cmd_name)(_import(cmd_name))
        command = typer.main.get_command(app)
        for parameter in command.params:
            if parameter.param_type_name == "argument" and parameter.name:
                # Typer's own form differs between its versions.
                parameter.metavar = parameter.name.upper()
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a line; the error for an unknown name names near ones."""
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment] # names only
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run one command; Ctrl-C exits with 130 in every supported typer version."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def run(words: list[str]) -> int:
    """Run one command line; exceptions of the command propagate."""
    if words[:1] in (["devices"], ["plugins"]) and words[1:] in ([], ["--json"]):
        # Nothing to parse; setting up typer's parser takes 0.1 s.
        _import(words[0])(as_json=len(words) == 2)
        return 0
    if words[:1] == ["bench"] and words[1:2] in (["mix"], ["serve"]):
        words = [f"bench-{words[1]}", *words[2:]]
    app = typer.Typer(
        cls=LazyGroup,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=_markup(),
    )
    app.callback()(root)
    try:
        typer.main.get_command(app).main(words, prog_name="inl")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and exit.",
            is_eager=True,
            callback=lambda asked: _show_version(asked),
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show tracebacks and debug logs (same as INL_DEBUG=1)."
        ),
    ] = False,
) -> None:
    """One model definition on any accelerator."""


def _import(command: str) -> Any:
    module, _, name = COMMANDS[command].partition(":")
    with gc_disabled():
        return getattr(import_module(module), name)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"inl {inl.__version__}")
        raise typer.Exit


def _markup() -> Any:
    """Use rich markup on a terminal only; importing rich takes 0.1 s."""
    return "rich" if sys.stdout.isatty() and sys.stderr.isatty() else None
