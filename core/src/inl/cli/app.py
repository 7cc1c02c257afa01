"""Command table; the module of a command is imported when the command runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

import inl
from inl.errors import PluginError
from inl.garbage_collection import gc_disabled
from inl.plugin.builtin_commands import COMMANDS as COMMANDS
from inl.plugin.builtin_commands import SUMMARIES as SUMMARIES
from inl.plugin.contribution import guarded
from inl.plugin.loader import registered_commands

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Of click, which newer versions of typer contain."""


OF_OTHERS = {
    "run": "inl chat --model MODEL, or inl generate PROMPT --model MODEL",
    "show": "inl models MODEL",
    "stop": "the server's --idle-unload",
}
"""Commands of Ollama that have another name here."""


class LazyGroup(TyperGroup):
    """Typer group that imports the command of a line: of the core, or of a plugin."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return all command names in the order of the help page."""
        return [*COMMANDS, *registered_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a command with its summary; ``None`` for an unknown name."""
        if cmd_name in SUMMARIES:
            return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])
        if cmd_name in COMMANDS:
            return import_command(cmd_name)
        if cmd_name not in registered_commands():
            return None
        origin, summary = registered_commands()[cmd_name]
        panel = f"Commands of {origin.package}"
        return TyperCommand(cmd_name, help=summary, rich_help_panel=panel)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section of the core's commands, and one for each plugin's."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            title = command.rich_help_panel or "Commands"
            text = command.get_short_help_str(formatter.width)
            sections.setdefault(title, []).append((name, text))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a line; the error for an unknown name names near ones."""
        names = COMMANDS if args[0] in COMMANDS else self.list_commands(ctx)
        if args[0] in OF_OTHERS and args[0] not in names:
            raise UsageError(f"No such command {args[0]!r}; try {OF_OTHERS[args[0]]}")
        self.commands = dict.fromkeys(names)  # type: ignore[assignment] # names only
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and import_command(str(name)), rest

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
        rich_markup_mode=_markup(),
    )
    app.callback()(root)
    group = typer.main.get_command(app)
    try:
        code = group.main(words or ["--help"], prog_name="inl", standalone_mode=False)
    except UsageError as error:
        print(_usage(error), file=sys.stderr)
        return 2
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return code or 0


def _usage(error: Any) -> str:
    """Return one line for an error of the parser, instead of its box."""
    message = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx else "inl"
    return f"inl: {message} (see {command} --help)"


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


def import_command(name: str) -> Any:
    """Import one command with its parameters.

    Raises :class:`~inl.errors.PluginError` for a command of a plugin that is none.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=_markup())
    app.command(name)(_import(name))
    if name in COMMANDS:
        command = typer.main.get_command(app)
    else:
        try:
            command = guarded(lambda: typer.main.get_command(app))
        except PluginError as error:
            origin, _ = registered_commands()[name]
            raise PluginError(f"{origin}: command {name}: {error}") from error
    for parameter in command.params:
        if parameter.param_type_name == "argument" and parameter.name:
            # Typer's own form differs between its versions.
            parameter.metavar = parameter.name.upper()
    return command


def _import(command: str) -> Any:
    if command not in COMMANDS:
        from inl.plugin import registry

        return registry().function("command", command)[1]
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
