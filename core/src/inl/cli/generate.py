"""``inl generate``: complete one prompt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.answer_output import print_answer, truncation
from inl.cli.chat_options import ChatOptions
from inl.cli.option_groups import SamplingOptions, SpeculativeOptions, with_groups
from inl.cli.progress import loading_bar
from inl.cli.prompt_input import read_prompt
from inl.errors import RequestError
from inl.garbage_collection import gc_disabled

if TYPE_CHECKING:
    from inl.engine.inference_engine import Completion, InferenceEngine
    from inl.executor.model_loader import LanguageModel
    from inl.text.tokenizer import Tokenizer


@with_groups
def run(
    *,
    prompt: arguments.Prompt = None,
    system: arguments.System = None,
    model: arguments.Model = None,
    engine_options: SpeculativeOptions,
    sampling: SamplingOptions,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; can be repeated.")
    ] = None,
    json_schema: arguments.JsonSchema = None,
    image: arguments.Image = None,
    raw: arguments.Raw = False,
    chat_options: ChatOptions,
    no_generation_prompt: Annotated[
        bool,
        typer.Option(
            "--no-generation-prompt", help="Do not begin the answer after PROMPT."
        ),
    ] = False,
    answer_prefix: Annotated[
        str | None, typer.Option(help="Beginning of the answer, to be continued.")
    ] = None,
    adapter: arguments.Adapter = None,
    as_json: arguments.Json = False,
) -> None:
    """Generate a completion of PROMPT."""
    with gc_disabled():  # here, so that the help page does not import the engine
        from inl.checkpoints.hub.resolve import resolve_model
        from inl.engine.inference_engine import InferenceEngine
        from inl.executor.model_loader import longest_context, open_model
        from inl.runners.startup import check_place
        from inl.text.measure import check_length

    began = time.perf_counter()
    options = sampling.generation_options(stop, json_schema)
    adapters = arguments.adapters(adapter, single=True)
    chat = chat_options.arguments()
    if no_generation_prompt:
        chat |= {"add_generation_prompt": False}
    if answer_prefix is not None:
        chat |= {"continue_final_message": True}
    if raw and system is not None:
        raise RequestError("--system: needs the chat template; leave out --raw")
    if raw and image:
        raise RequestError("--image: needs the chat template; leave out --raw")
    text = read_prompt(prompt)
    check_place(engine_options.config())
    language = open_model(resolve_model(model))
    tokenizer = language.checkpoint.tokenizer()
    context = longest_context(language)
    if raw:
        check_length(tokenizer, text, context)
        ids = tokenizer.encode(text)
    else:
        content: Any = text
        if image:
            content = [{"type": "image", "image": Path(path)} for path in image]
            content.append({"type": "text", "text": text})
        messages = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        if answer_prefix is not None:
            messages.append({"role": "assistant", "content": answer_prefix})
        ids = _chat_ids(language, tokenizer, messages, chat)
        options["images"] = image
    config = engine_options.config(
        max_batch=1,
        context=min(context, len(ids) + max(sampling.max_tokens, 1)),
        **arguments.adapter_settings(adapters),
    )
    engine = InferenceEngine(language, tokenizer, config, progress=loading_bar())
    loaded = time.perf_counter() - began
    options["adapter"] = next(iter(adapters), None)
    with engine:
        if as_json:
            _print_json(engine, engine.submit(ids, **options).result(), loaded, options)
            return
        handle = engine.submit(ids, **options)
        print_answer(engine, handle)
        if note := truncation(handle, len(ids), context):
            print(note, file=sys.stderr)


def _chat_ids(
    language: LanguageModel,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> list[int]:
    from inl.engine.chat import chat_ids, prepare_chat
    from inl.engine.image_prompts import ImagePrompts
    from inl.engine.prompt_images import without_images
    from inl.executor.model_loader import longest_context

    messages, images = without_images(messages)
    template = language.checkpoint.chat_template
    prepare_chat(template, tokenizer, with_tools=options.get("tools") is not None)
    prompts = ImagePrompts(language, lambda _purpose: tokenizer)
    ids = chat_ids(
        language, template, tokenizer, messages, context=longest_context(language),
        place_images=partial(prompts.marked, images=images) if images else None,
        **options,
    )  # fmt: skip
    if template is not None:
        template.close()
    return prompts.expanded(ids, images) if images else ids


def _print_json(
    engine: InferenceEngine,
    completion: Completion,
    loaded: float,
    options: Mapping[str, Any],
) -> None:
    from inl.engine.options import NEUTRAL_SAMPLING, with_sampling

    count = len(completion.token_ids)
    sampling = NEUTRAL_SAMPLING | with_sampling(options, engine.sampling_defaults)
    decode = completion.seconds - completion.first_token_seconds
    timings = {
        "load_seconds": round(loaded, 4),
        "first_token_seconds": round(completion.first_token_seconds, 4),
        "total_seconds": round(completion.seconds, 4),
        "decode_tokens_per_second": round((count - 1) / decode, 2)
        if count > 1 and decode > 0  # a grammar can allow one output: one step
        else None,
    }
    print(
        json.dumps(
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "prompt_tokens": completion.prompt_tokens,
                "finish_reason": completion.finish_reason,
                "seed": completion.seed,
                "sampling": {name: sampling[name] for name in NEUTRAL_SAMPLING},
                "device": engine.device,
                "timings": timings,
            },
            ensure_ascii=False,
        )
    )
