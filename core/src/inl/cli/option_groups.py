"""Options that commands share, as dataclasses of annotated fields.

A command takes a group as one parameter; :func:`with_groups` makes an option of each of
its fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from inl.cli import arguments

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.engine.options import GenerationOptions

CONFIG_NAMES = {
    "device": "backend", "draft_device": "draft_backend",
    "vision_device": "vision_backend",
}  # fmt: skip
"""Options whose field of ``EngineConfig`` has another name."""


def with_groups(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one option for each field of its dataclass parameters.

    Options are in the order of parameters and fields; defaults are those of the fields.
    """
    hints = get_type_hints(run, include_extras=True)
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(run).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            groups[parameter.name] = hint
            options += _options(hint)
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            options.append(parameter.replace(annotation=hint, kind=kind))

    @wraps(run)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            given = {each.name: values.pop(each.name) for each in fields(group)}
            values[name] = group(**given)
        run(**values)

    # Typer reads both.
    vars(command)["__signature__"] = inspect.Signature(options)
    command.__annotations__ = {each.name: each.annotation for each in options}
    return command


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )
        for each in fields(group)
    ]


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """What the kernels of a model depend on; defaults are those of ``EngineConfig``."""

    device: arguments.Device = "auto"
    dtype: arguments.Dtype = "auto"
    kv_dtype: arguments.KvDtype = "auto"
    quantize: arguments.Quantize = None
    allow_hosted: Annotated[
        bool,
        typer.Option(
            "--allow-hosted", help="Compute ops without a kernel in NumPy on the host."
        ),
    ] = False
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="Use only kernels whose results do not depend on the batch.",
        ),
    ] = False

    def config(self, **settings: Any) -> EngineConfig:
        """Return the engine's settings: these, and other fields of ``EngineConfig``.

        Raises :class:`~inl.errors.RequestError`.
        """
        from inl.config import EngineConfig

        # What is measured or explained does not depend on a model's recommendation.
        given: dict[str, Any] = {"generation_config": "none"}
        given |= {
            CONFIG_NAMES.get(name, name): each for name, each in vars(self).items()
        }
        if given.get("speculation") == "none":
            given["speculation"] = None
        return EngineConfig(**given, **settings)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(KernelOptions):
    """Settings of an engine that a command measures."""

    placement: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=SIZE,...",
            help="Devices that share the model, starting at --device: axes data, "
            "pipeline, tensor, expert. [default: one device]",
        ),
    ] = None
    tensor_parallel: Annotated[
        int, typer.Option(help="Short for --placement tensor=N.")
    ] = 1
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=SIZE,...",
            help="Short for a --placement whose devices one program drives.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions(EngineOptions):
    """Settings of an engine whose output is used."""

    mmproj: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="GGUF file with the vision encoder of a GGUF model. [default: one "
            "beside it]",
        ),
    ] = None
    vision_device: Annotated[
        str | None,
        typer.Option(help="Device that encodes images. [default: --device]"),
    ] = None
    kv_host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory for blocks of the cache that the device has no room for, "
            "such as 8GiB; 0 for none. [default: by the free memory]",
        ),
    ] = None
    snapshot_host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory for snapshots of recurrent state, such as 2GiB, with "
            "which prompts share leading tokens. [default: an eighth of what is free, "
            "8GiB at most]",
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE:FOLDER",
            help="Files for such blocks, which later processes read too, such as "
            "100GiB:cache. [default: none]",
        ),
    ] = None
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|none",
            help="Whether the model's generation_config.json sets the defaults of "
            "sampling options.",
        ),
    ] = "auto"

    speculation: Annotated[
        str,
        typer.Option(
            help='Source of drafted tokens that a step verifies: "ngram", "mtp", or '
            '"model" or "eagle" with --draft-model; "none"; "auto" is "mtp" where the '
            "model has it and it pays."
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Small model with the same tokenizer, or a draft head's folder."
        ),
    ] = None
    draft_device: Annotated[
        str | None, typer.Option(help="Device of the draft model. [default: --device]")
    ] = None
    max_drafts: Annotated[
        int | None,
        typer.Option(
            help="Drafted tokens of a sequence and step. [default: 15]", min=1, max=127
        ),
    ] = None
    adaptive_drafts: Annotated[
        bool,
        typer.Option(
            "--adaptive-drafts/--no-adaptive-drafts",
            help="Choose the number of drafts from measured times, or verify all.",
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the tokens of an answer are chosen, and how many."""

    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 256
    temperature: arguments.Temperature = None
    seed: Annotated[
        int | None, typer.Option(help="Random seed. [default: a new one per request]")
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from the k most likely tokens; 0 disables. "
            "[default: the model's, or 0]"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Nucleus sampling: cumulative probability. "
            "[default: the model's, or 1]"
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Minimum probability relative to the top token. "
            "[default: the model's, or 0]"
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Values above 1 penalize repeated tokens. [default: the model's, or 1]"
        ),
    ] = None

    def generation_options(
        self, stop: list[str] | None = None, json_schema: str | None = None
    ) -> GenerationOptions:
        """Return the engine's options; raises :class:`~inl.errors.RequestError`.

        stop: stop strings. json_schema: of the answer, a file or JSON text.
        """
        from inl.cli.prompt_input import read_schema
        from inl.engine.options import make_requests

        fields = {"stop": stop, "structured": read_schema(json_schema)}
        options = cast("GenerationOptions", {**vars(self), **fields})
        make_requests([0], options, room=1)  # validates, before a model is loaded
        return options
