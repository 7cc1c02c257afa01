"""``inl chat``: interactive conversation with a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from inl.cli import arguments
from inl.cli.chat_commands import run_command
from inl.cli.chat_input import open_lines
from inl.cli.chat_options import ChatOptions
from inl.cli.chat_session import Chat
from inl.cli.conversation import Conversation
from inl.cli.interrupt import Interrupt
from inl.cli.option_groups import SamplingOptions, SpeculativeOptions, with_groups
from inl.cli.progress import loading_bar


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SamplingOptions):
    """How each answer is chosen."""

    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of new tokens per answer.", min=1)
    ] = 1024
    temperature: arguments.Temperature = 0.7


@with_groups
def run(
    *,
    model: arguments.Model = None,
    engine_options: SpeculativeOptions,
    system: arguments.System = None,
    sampling: AnswerOptions,
    context: Annotated[
        int | None,
        typer.Option(help="Context length in tokens. [default: the model's]", min=16),
    ] = None,
    json_schema: arguments.JsonSchema = None,
    chat_options: ChatOptions,
    adapter: arguments.Adapter = None,
) -> None:
    """Chat with a model; /help lists commands. Ctrl-C stops an answer."""
    from inl.engine.inference_engine import InferenceEngine

    options = sampling.generation_options(json_schema=json_schema)
    chat = chat_options.arguments()
    adapters = arguments.adapters(adapter, single=True)
    config = engine_options.config(
        max_batch=1, context=context, **arguments.adapter_settings(adapters)
    )
    options["adapter"] = next(iter(adapters), None)
    interrupt = Interrupt()
    engine = InferenceEngine.from_pretrained(
        model, config, progress=loading_bar(), on_step=interrupt.on_step
    )
    with engine:
        session = Chat(engine, interrupt, options, Conversation(system), chat)
        session.run(open_lines(), run_command)
