"""Turns prompts and options into request handles."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from inl.checkpoints.sampling import sampling_defaults
from inl.engine.chat import chat_ids, prepare_chat
from inl.engine.image_prompts import ImagePrompts
from inl.engine.moved_request import portable_options
from inl.engine.options import (
    NO_BANS,
    GenerationOptions,
    Prompt,
    ban_options,
    is_conversation,
    is_empty,
    make_requests,
    stop_strings,
    with_sampling,
)
from inl.engine.prompt_embeddings import split_prompt
from inl.engine.prompt_images import without_images
from inl.engine.request_handle import RequestHandle
from inl.errors import RequestError, TokenizerNotFound
from inl.guidance.banned_tokens import BannedTokens
from inl.scheduling.sampling_params import rank, sampler_for
from inl.spec.step import NEUTRAL, PARAMS
from inl.text.measure import check_length

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.engine.options import Bans
    from inl.executor.model_loader import LanguageModel
    from inl.guidance.grammars import Grammars
    from inl.scheduling.guide import Guide
    from inl.scheduling.request import Request
    from inl.text.tokenizer import Tokenizer


log = logging.getLogger("inl")


class PromptEncoder:
    """Encodes prompts with a model's tokenizer and chat template.

    A model without a tokenizer serves token ids only: text then raises
    :class:`~inl.errors.RequestError`. tokenizer: used instead of the model's own.
    config: bounds of the options.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer | None, config: EngineConfig
    ) -> None:
        self._model = model
        self._config = config
        self._missing: TokenizerNotFound | None = None
        self._grammars: Grammars | None = None
        self.chat_template = model.checkpoint.chat_template
        if tokenizer is None:
            try:
                tokenizer = model.checkpoint.tokenizer()
            except TokenizerNotFound as error:
                self._missing = error
        self._tokenizer = tokenizer
        self.images = ImagePrompts(model, self.tokenizer)
        self.sampling_defaults = _sampling_defaults(model, config)
        """Sampling options of requests that do not set them."""

    def tokenizer(self, purpose: str) -> Tokenizer:
        """Return the tokenizer; raises ``RequestError`` if the model has none."""
        if self._tokenizer is None:
            raise RequestError(
                f"{purpose}: the model has no tokenizer ({self._missing}); "
                "pass token ids"
            ) from self._missing
        return self._tokenizer

    def chat_ids(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        context: int,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, see :func:`inl.engine.chat.chat_ids`.

        Raises :class:`~inl.errors.RequestError`.
        """
        tokenizer = self.tokenizer("chat")
        with_tools = options.get("tools") is not None
        prepare_chat(self.chat_template, tokenizer, with_tools=with_tools)
        images: list[Any] = []
        if not isinstance(messages, str):
            messages, images = without_images(messages)
        ids = chat_ids(
            self._model, self.chat_template, tokenizer, messages, context=context,
            place_images=partial(self.images.marked, images=images) if images else None,
            **options,
        )  # fmt: skip
        return self.images.expanded(ids, images) if images else ids

    def prepare(
        self,
        prompt: Prompt,
        *,
        context: int,
        vocab: int,
        **options: Unpack[GenerationOptions],
    ) -> RequestHandle:
        """Make the handle of a request, or of the first of ``n``, without queuing it.

        context: maximum number of tokens of prompt and output. vocab: size of the
        vocabulary, for error messages. Raises :class:`~inl.errors.RequestError`.
        """
        started = time.perf_counter()
        options = cast(
            "GenerationOptions", with_sampling(options, self.sampling_defaults)
        )
        images = _images(prompt, options.pop("images", None))
        if images and isinstance(prompt, str):
            prompt = self.images.marked(prompt, images)
        ids, embeddings = split_prompt(self.encode(prompt, context))
        if images:
            if embeddings is not None:
                raise RequestError("images: found embeddings too, accepts one of both")
            if isinstance(prompt, str):
                ids = self.images.expanded(ids, images)
            if len(ids) < context:  # else it is refused below
                embeddings = self.images.embeddings(ids, images)
        elif embeddings is None:
            self.images.check_text(ids)
        try:
            room = context - len(ids)
            requests = make_requests(
                ids, options, room=room, config=self._config, embeddings=embeddings
            )
            if (structured := options.get("structured")) is not None:
                for request in requests:
                    request.guide = self._compile(structured, vocab)
            elif (bans := ban_options(options, self._config)) != NO_BANS:
                for request in requests:
                    request.guide = self._ban(bans, request, vocab)
        except RequestError:
            _check_signs(ids, vocab)
            raise
        stops = stop_strings(options.get("stop"), self._config)
        if stops:
            self.tokenizer("stop")
        samples = [
            RequestHandle(
                request,
                self._tokenizer,
                stops,
                started,
                skip_special=options.get("skip_special_tokens", True),
                is_empty=is_empty(options),
            )
            for request in requests
        ]
        for sample in samples:
            sample.options = portable_options(options, sample.request)
        first, *others = samples
        first.further_samples = tuple(others)
        return first

    def _compile(self, structured: Any, vocab: int) -> Guide:
        if self._grammars is None:
            from inl.guidance.grammars import Grammars

            self._grammars = Grammars(
                partial(self.tokenizer, "structured"),
                vocab,
                self._model.checkpoint.eos_token_ids,
                self._config.max_grammar_bytes,
            )
        return self._grammars.guide(structured)

    def _ban(self, bans: Bans, request: Request, vocab: int) -> Guide:
        """Return a guide that bans tokens of one request."""
        eos = () if request.ignore_eos else self._model.checkpoint.eos_token_ids
        phrases = set()
        for word in bans.bad_words:
            encode = self.tokenizer("bad_words").encode
            phrases |= {
                tuple(encode(text, False, plain=True)) for text in (word, f" {word}")
            }
        return BannedTokens(
            vocab,
            min_tokens=bans.min_tokens,
            end_ids=request.stop_ids.union(eos),
            phrases=sorted(phrases - {()}),
        )

    def close(self) -> None:
        """End the processes of the chat template and of grammars."""
        if self.chat_template is not None:
            self.chat_template.close()
        if self._grammars is not None:
            self._grammars.close()

    def encode(self, prompt: Prompt, context: int) -> list[int]:
        """Return the token ids of a text or conversation, or a list as it is.

        Raises :class:`~inl.errors.RequestError` if there are none.
        """
        if isinstance(prompt, str):
            tokenizer = self.tokenizer("prompt")
            check_length(tokenizer, prompt, context)
            ids = tokenizer.encode(prompt)
        elif is_conversation(prompt):
            messages = cast("Sequence[Mapping[str, Any]]", prompt)
            ids = self.chat_ids(messages, context=context)
        else:
            ids = list(cast("Sequence[int]", prompt))
        if not ids:
            raise RequestError(
                f"prompt: found {prompt!r:.60}, which has no tokens; needs at least one"
            )
        return ids


def _images(prompt: Prompt, given: Sequence[Any] | None) -> list[Any]:
    """Return the images of a prompt: of its messages, or those given beside it."""
    if given is not None and not isinstance(given, list | tuple):
        raise RequestError(f"images: found {given!r:.60}, accepts a list of images")
    found: list[Any] = []
    if is_conversation(prompt):
        _, found = without_images(cast("Sequence[Mapping[str, Any]]", prompt))
    if found and given:
        raise RequestError("images: found some in messages too, accepts one of both")
    return found or list(given or ())


def _check_signs(ids: Sequence[int], vocab: int) -> None:
    """Name the accepted range for a negative id; a request does not know it."""
    for position, token in enumerate(ids):
        if isinstance(token, int) and token < 0:
            raise RequestError(
                f"prompt[{position}]: found token {token}, accepts 0 to {vocab - 1}"
            )


def _sampling_defaults(model: LanguageModel, config: EngineConfig) -> dict[str, float]:
    """Return what the model recommends, if requests may use it."""
    if config.generation_config == "none":
        return {}
    checkpoint = model.checkpoint
    found = sampling_defaults(checkpoint.generation_config, str(checkpoint.path))
    params = {**dict(zip(PARAMS, NEUTRAL, strict=True)), **found}
    if rank(sampler_for(params)) > rank(config.sampling):
        log.warning(
            '%s: the model recommends %s, which sampling="%s" has no programs for; '
            "requests are greedy by default",
            model.name, show_sampling(found), config.sampling,
        )  # fmt: skip
        return {}
    if found:
        log.info(
            "%s: requests without sampling options use the model's: %s "
            '(generation_config="none" ignores them)',
            model.name, show_sampling(found),
        )  # fmt: skip
    return found


def show_sampling(values: Mapping[str, float]) -> str:
    """Return sampling options as text."""
    return ", ".join(f"{name}={value:g}" for name, value in values.items())
