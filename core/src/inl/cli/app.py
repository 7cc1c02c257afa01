"""Command table; the module of a command is imported when the command runs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

import inl
from inl.garbage_collection import gc_disabled

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Of click, which newer versions of typer contain."""
COMMANDS = {
    "generate": "inl.cli.generate:run",
    "devices": "inl.cli.devices:run",
    "plugins": "inl.cli.plugins:run",
    "explain": "inl.cli.explain:run",
    "plan": "inl.cli.plan:run",
    "chat": "inl.cli.chat:run",
    "serve": "inl.cli.serve:run",
    "models": "inl.cli.models:run",
    "pull": "inl.cli.store:pull",
    "list": "inl.cli.store:list_models",
    "rm": "inl.cli.store:rm",
    "ps": "inl.cli.ps:run",
    "quantize": "inl.cli.quantize:run",
    "convert": "inl.cli.convert:run",
    "perplexity": "inl.cli.perplexity:run",
    "embed": "inl.cli.embed:run",
    "ops": "inl.cli.ops:run",
    "doctor": "inl.cli.doctor:run",
    "build-kernels": "inl.cli.build_kernels:run",
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


SUMMARIES = {
    "generate": "Generate a completion of PROMPT.",
    "devices": "List devices, and why others are unavailable.",
    "plugins": "List every plugin; a broken plugin is shown with its error.",
    "explain": "Show the kernels that a step of a model would use. Loads no weights.",
    "plan": "Show how devices divide a model; loads no weights.",
    "chat": "Chat with a model; /help lists commands. Ctrl-C stops an answer.",
    "serve": "Serve MODEL to clients of OpenAI's and Anthropic's APIs.",
    "models": "List cached models and architectures, or inspect MODEL.",
    "pull": "Download the model NAME and print its path. A cached one is kept.",
    "list": "List the models in the caches, with their sizes and times.",
    "rm": "Remove the model NAME from its cache, after a question.",
    "ps": "List the models that the server at URL has loaded.",
    "quantize": "Quantize MODEL once, and write it to OUT.",
    "convert": "Write MODEL to OUT in the other format.",
    "perplexity": "Print the perplexity of MODEL on the text in FILE.",
    "embed": "Print the embedding of each TEXT as a line of JSON.",
    "ops": "List ops, their signatures and the kernels of backends.",
    "doctor": "Check this machine and print what fixes its problems.",
    "build-kernels": "Compile native kernels where they are installed.",
    "bench": "Measure load time, first token, prefill, decode and memory.",
    "bench-mix": "Measure one engine under many loads. Prints medians.",
    "bench-serve": "Measure the server at URL: latency, throughput, goodput.",
    "run-batch": "Answer REQUESTS in ANSWERS. Continues where an earlier run ended.",
    "pipe": "Serve one program by frames on standard input and output.",
    "tune": "Find and store the fastest correct config of each op.",
    "completion": "Print the completion script of SHELL.",
    "trace": "Complete PROMPT and write a trace for `inl replay`.",
    "replay": "Replay FILE and compare its tokens.",
    "check": "Check the backend of DEVICE against the reference ops.",
    "new-plugin": "Create a package inl-NAME with a backend to start from.",
}
"""First line of each docstring: the help page imports no command, which takes 0.2 s."""


OF_OTHERS = {
    "run": "inl chat --model MODEL, or inl generate PROMPT --model MODEL",
    "show": "inl models MODEL",
    "stop": "the server's --idle-unload",
}
"""Commands of Ollama that have another name here."""


class LazyGroup(TyperGroup):
    """Typer group that imports the command of a line from :data:`COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return all command names in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a command with its summary; ``None`` for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in SUMMARIES:
            return self.import_command(cmd_name)
        return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])

    def import_command(self, cmd_name: str) -> Any:
        """Import one command with its parameters."""
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
        if args[0] in OF_OTHERS:
            raise UsageError(f"No such command {args[0]!r}; try {OF_OTHERS[args[0]]}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.import_command(str(name)), rest

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
