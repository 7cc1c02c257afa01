"""``inl generate``: complete one prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from inl.adapters.folder import highest_rank
from inl.checkpoints.hub.resolve import resolve_model
from inl.cli import arguments
from inl.cli.chat_options import chat_options
from inl.cli.progress import loading_bar
from inl.config import EngineConfig
from inl.engine.chat import chat_ids, prepare_chat
from inl.engine.inference_engine import Completion, InferenceEngine
from inl.engine.options import GenerationOptions, make_requests
from inl.errors import RequestError
from inl.executor.model_loader import (
    LanguageModel,
    longest_context,
    open_model,
)
from inl.text.measure import check_length
from inl.text.tokenizer import Tokenizer
from inl.workers.startup import check_place


def run(
    prompt: Annotated[str, typer.Argument(help="Prompt text.")],
    model: arguments.Model = None,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    kv_dtype: arguments.KvDtype = "auto",
    quantize: arguments.Quantize = None,
    tensor_parallel: arguments.TensorParallel = 1,
    mesh: arguments.Mesh = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of new tokens.")
    ] = 256,
    temperature: arguments.Temperature = 0.0,
    seed: arguments.Seed = None,
    top_k: arguments.TopK = 0,
    top_p: arguments.TopP = 1.0,
    min_p: arguments.MinP = 0.0,
    repetition_penalty: arguments.RepetitionPenalty = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; can be repeated.")
    ] = None,
    raw: arguments.Raw = False,
    trust_control_tokens: arguments.TrustControlTokens = False,
    allow_hosted: arguments.AllowHosted = False,
    tools: arguments.Tools = None,
    documents: arguments.Documents = None,
    chat_template_kwarg: arguments.TemplateOption = None,
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
    began = time.perf_counter()
    options: GenerationOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
    }
    adapters = arguments.adapters(adapter)
    if len(adapters) > 1:
        raise RequestError(
            f"--adapter: found {len(adapters)}, one prompt accepts one adapter"
        )
    make_requests([0], options, room=1)  # validate options before loading the model
    chat = chat_options(tools, documents, chat_template_kwarg)
    chat |= {"trust_control_tokens": trust_control_tokens}
    if no_generation_prompt:
        chat |= {"add_generation_prompt": False}
    if answer_prefix is not None:
        chat |= {"continue_final_message": True}
    check_place(EngineConfig(backend=device))
    language = open_model(resolve_model(model))
    tokenizer = language.checkpoint.tokenizer()
    context = longest_context(language)
    if raw:
        check_length(tokenizer, prompt, context)
        ids = tokenizer.encode(prompt)
    else:
        messages = [{"role": "user", "content": prompt}]
        if answer_prefix is not None:
            messages.append({"role": "assistant", "content": answer_prefix})
        ids = _chat_ids(language, tokenizer, messages, chat)
    config = EngineConfig(
        backend=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        tensor_parallel=tensor_parallel,
        mesh=mesh,
        allow_hosted=allow_hosted,
        max_batch=1,
        adapters=adapters,
        max_adapter_rank=max(map(highest_rank, adapters.values()), default=1),
        context=min(context, len(ids) + max(max_tokens, 1)),
    )
    engine = InferenceEngine(language, tokenizer, config, progress=loading_bar())
    loaded = time.perf_counter() - began
    options["adapter"] = next(iter(adapters), None)
    with engine:
        if as_json:
            _print_json(engine, engine.generate(ids, **options), loaded)
            return
        for piece in engine.stream(ids, **options):
            print(piece, end="", flush=True)
        print()


def _chat_ids(
    language: LanguageModel,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> list[int]:
    template = language.checkpoint.chat_template
    prepare_chat(template, tokenizer, with_tools=options.get("tools") is not None)
    ids = chat_ids(
        language, template, tokenizer, messages, context=longest_context(language),
        **options,
    )  # fmt: skip
    if template is not None:
        template.close()
    return ids


def _print_json(engine: InferenceEngine, completion: Completion, loaded: float) -> None:
    count = len(completion.token_ids)
    decode = completion.seconds - completion.first_token_seconds
    timings = {
        "load_seconds": round(loaded, 4),
        "first_token_seconds": round(completion.first_token_seconds, 4),
        "total_seconds": round(completion.seconds, 4),
        "decode_tokens_per_second": round((count - 1) / decode, 2)
        if count > 1
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
                "device": engine.device,
                "timings": timings,
            },
            ensure_ascii=False,
        )
    )
