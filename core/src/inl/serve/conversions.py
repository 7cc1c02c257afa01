"""Token conversion: ``/tokenize``, ``/detokenize`` and ``count_tokens``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inl.errors import PromptTooLong
from inl.serve.anthropic.messages import CountRequest, conversation_of
from inl.serve.api_error import ApiError
from inl.serve.bounded_calls import BoundedCalls
from inl.serve.dialect import parse
from inl.serve.event_stream import encode
from inl.serve.http_messages import decoded
from inl.serve.job import Conversation
from inl.serve.openai.fields import TokenId
from inl.serve.openai.messages import (
    Message,
    ToolSchema,
    template_messages,
    tools_of,
)
from inl.serve.remote_images import ImageFetcher
from inl.text.measure import check_length

if TYPE_CHECKING:
    from inl.serve.models import Models
    from inl.serve.served_model import ServedModel
    from inl.serve.settings import ServerConfig

RUNNING = 2
"""Conversions that run at the same time, on threads of their own."""


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolSchema] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/detokenize``."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]
    model: str | None = None


class Conversions:
    """Endpoints that convert between text and tokens."""

    def __init__(self, models: Models, config: ServerConfig) -> None:
        self._models = models
        self._most_tokens = config.max_queued_tokens
        self._images = ImageFetcher(config.image_hosts)
        self._calls = BoundedCalls(
            models, config, name="inl-conversions", running=RUNNING
        )

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        post = partial(Route, methods=["POST"])
        return [
            post("/tokenize", self.tokenize),
            post("/detokenize", self.detokenize),
            post("/v1/messages/count_tokens", self.count_tokens),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        async with self._calls.admitted(request) as (_, body):
            fields = await decoded(body, partial(parse, schema=TokenizeRequest))
            return await self._convert(fields.model, self._tokenized, fields)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        async with self._calls.admitted(request) as (_, body):
            fields = await decoded(body, partial(parse, schema=DetokenizeRequest))
            return await self._convert(fields.model, _detokenized, fields)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation."""
        async with self._calls.admitted(request) as (_, body):
            model, conversation = await decoded(body, _counted_of)
            return await self._convert(model, self._counted, conversation)

    async def tokenizer_info(self, request: Request) -> Response:
        """Return special tokens and chat template of the model of the query."""
        name = request.query_params.get("model")
        async with self._calls.admitted(request):
            return await self._convert(
                name, lambda model, _: _tokenizer_info(model), None
            )

    async def _convert(
        self, name: str | None, work: Callable[[ServedModel, Any], Any], fields: Any
    ) -> Response:
        """Return the body that ``work`` returns, made on a thread."""
        async with self._models.find(name).lease() as model:
            body = await self._calls.run(lambda: encode(work(model, fields)))
        return Response(body, media_type="application/json")

    def _tokenized(self, model: ServedModel, fields: TokenizeRequest) -> dict[str, Any]:
        ids = self._ids(model, fields)
        body: dict[str, Any] = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": model.engine.context,
        }
        if fields.return_token_strs:
            texts = map(model.token_texts, ids)
            body["token_strs"] = [text.decode("utf-8", "replace") for text in texts]
        return body

    def _ids(self, model: ServedModel, fields: TokenizeRequest) -> list[int]:
        if (fields.prompt is None) == (fields.messages is None):
            text = "prompt: accepts either prompt or messages"
            raise ApiError(400, text, param="prompt")
        if fields.messages is None:
            tokenizer, prompt = model.engine.tokenizer, fields.prompt or ""
            try:
                check_length(tokenizer, prompt, self._most_tokens)
            except PromptTooLong as error:
                raise ApiError(
                    400,
                    f"prompt: found {len(prompt)} characters, accepts up to "
                    f"{self._most_tokens} tokens (--max-queued-tokens)",
                    param="prompt",
                    code="context_length_exceeded",
                ) from error
            return tokenizer.encode(prompt, add_special=fields.add_special_tokens)
        variables: dict[str, Any] = {}
        if not fields.add_generation_prompt:
            variables["add_generation_prompt"] = False
        messages = template_messages(fields.messages)
        tools = tools_of(fields.tools)
        conversation = Conversation(
            messages, tools, variables=variables,
            continue_final=fields.continue_final_message,
        )  # fmt: skip
        return model.encode(*self._images.fetched([conversation]))

    def _counted(
        self, model: ServedModel, conversation: Conversation
    ) -> dict[str, Any]:
        ids = model.encode(*self._images.fetched([conversation]))
        return {"input_tokens": len(ids)}


def _detokenized(model: ServedModel, fields: DetokenizeRequest) -> dict[str, Any]:
    tokenizer = model.engine.tokenizer
    for at, token in enumerate(fields.tokens):
        if tokenizer.token(token) is None:
            text = f"tokens[{at}]: found {token}, which is no token of the model"
            raise ApiError(400, text, param="tokens")
    return {"prompt": tokenizer.decode(fields.tokens, False)}


def _tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Describe the tokenizer with the fields of ``tokenizer_config.json``."""
    engine = model.engine
    tokenizer, template = engine.tokenizer, engine.chat_template
    end = tokenizer.eos_token or None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": engine.context,
        "bos_token": tokenizer.bos_token or None,
        "eos_token": end,
        # Batches are not padded; programs that pad need a name.
        "pad_token": end,
        "chat_template": template and template.source,
    }


def _counted_of(body: bytes) -> tuple[str | None, Conversation]:
    """Return the model and the conversation whose tokens are counted."""
    fields = parse(body, CountRequest)
    return fields.model, conversation_of(fields)
