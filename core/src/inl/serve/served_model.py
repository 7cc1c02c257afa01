"""A model that a server offers: its engine, its prompts and its open requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from inl.engine.options import GenerationOptions
from inl.errors import RequestError
from inl.serve.api_error import ApiError, as_api_error
from inl.serve.generations import Generation, Generations
from inl.serve.job import Conversation, Job, Prompt
from inl.serve.output_parser import OutputParser, PlainParser
from inl.serve.wakeups import Wakeups
from inl.text.measure import check_length

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.serve.admission import Admission, Ticket
    from inl.serve.metrics import Metrics


class ServedModel:
    """One engine behind one name."""

    def __init__(
        self, name: str, engine: InferenceEngine, admission: Admission, metrics: Metrics
    ) -> None:
        self.name = name
        self.engine = engine
        self.created = int(time.time())
        self._admission = admission
        self._metrics = metrics
        self._wakeups: Wakeups | None = None

    def warm_up(self) -> None:
        """Build the tokenizer and start the template's process, if it has them."""
        with suppress(RequestError):
            self.engine.tokenizer.encode("a")
            self.engine.chat_ids("a")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text; empty for an unknown id."""
        tokenizer = self.engine.tokenizer
        if tokenizer.token(token) is None:
            return b""
        if tokenizer.byte_level:
            return tokenizer.token_bytes(token)
        return tokenizer.decode([token], skip_special=False).encode()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; raises the engine's errors."""
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str):
            check_length(self.engine.tokenizer, prompt, self.engine.context)
            return self.engine.tokenizer.encode(prompt)
        return self._encode_conversation(prompt)

    def _encode_conversation(self, conversation: Conversation) -> list[int]:
        return self.engine.chat_ids(
            conversation.messages,
            continue_final_message=conversation.continue_final,
            **conversation.variables,
        )

    async def start(self, job: Job, client: str) -> Generations:
        """Admit a job and submit its prompts; raises :class:`ApiError`."""
        ticket = self._admission.enter(client, job.completions)
        started: list[Generation] = []
        try:
            # A long text takes a while to encode.
            prompts = await asyncio.to_thread(self._encode_all, job.prompts)
            self._admission.charge(ticket, sum(map(len, prompts)) * job.count)
            event = asyncio.Event()
            for prompt, ids in zip(job.prompts, prompts, strict=True):
                for number in range(job.count):
                    started.append(self._submit(job, prompt, ids, number, event))
        except BaseException as error:
            self._cancel(started)
            self._admission.leave(ticket, finished=False)
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise
        return Generations(
            started,
            event,
            on_begin=partial(self._admission.begun, ticket),
            on_delta=self._metrics.record_delta,
            on_close=partial(self._close, started, ticket),
        )

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return [tuple(self.encode(prompt)) for prompt in prompts]

    def _submit(
        self,
        job: Job,
        prompt: Prompt,
        ids: Sequence[int],
        number: int,
        event: asyncio.Event,
    ) -> Generation:
        if self._wakeups is None:
            self._wakeups = Wakeups(asyncio.get_running_loop())
        options: GenerationOptions = {**job.options}
        seed = options.get("seed")
        if seed is not None:
            options["seed"] = seed + number
        listener = partial(self._wakeups.wake, event)
        handle = self.engine.start(ids, listener=listener, **options)
        parser, stop = self._parser(prompt), partial(self._stop, options)
        return Generation(handle, parser, stop, is_first=number == 0)

    def _parser(self, prompt: Prompt) -> OutputParser:
        del prompt
        return PlainParser()

    def _stop(self, options: GenerationOptions, ids: list[int]) -> str | None:
        """Return the stop string with which the text of ``ids`` was ended."""
        text = self.engine.tokenizer.decode(ids)
        stop = options.get("stop") or ()
        strings = [stop] if isinstance(stop, str) else stop
        ends = [(text.find(each) + len(each), each) for each in strings if each in text]
        return min(ends)[1] if ends else None

    def _close(self, started: list[Generation], ticket: Ticket, finished: bool) -> None:
        self._cancel(started)
        self._admission.leave(ticket, finished=finished)
        for item in started:
            self._metrics.record_end(item)

    def _cancel(self, items: list[Generation]) -> None:
        for item in items:
            if not item.handle.completed:
                self.engine.cancel(item.handle)


class Models:
    """The models of a server, by name."""

    def __init__(self, model: ServedModel) -> None:
        self._models = {model.name: model}
        self.default = model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """Return a model; ``None`` is the default. Raises :class:`ApiError` 404."""
        if name is None:
            return self.default
        if name not in self._models:
            raise ApiError(
                404,
                f"model: found {name!r:.80}, this server has {', '.join(self._models)}",
                param="model",
                code="model_not_found",
            )
        return self._models[name]
