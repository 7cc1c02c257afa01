"""Models whose engine runs in another process, as front-ends see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from operator import ge
from typing import TYPE_CHECKING, Any, Protocol

from inl.engine.answers.model_text import EncodedPrompt, ModelText
from inl.engine.options import random_seed
from inl.engine.text_model import TextModel
from inl.errors import RequestError
from inl.serve.api_error import model_not_found
from inl.serve.frontends.messages import (
    Leave,
    ReadResponse,
    Recall,
    Recalled,
    Stop,
    StoredResponse,
    StoreResponse,
    Submit,
    Trouble,
    plain,
)
from inl.serve.frontends.outputs import RemoteHandle, RemoteRequest
from inl.serve.frontends.resumed import (
    KnownOutput,
    RemoteGenerations,
    ResumedGenerations,
    has_tokens,
    known_output,
)
from inl.serve.generations import Generation, Generations
from inl.serve.health import Health
from inl.serve.load_failure import load_failure
from inl.serve.prompt_threads import encoded

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle
    from inl.serve.frontends.messages import ModelSettings, ToEngine
    from inl.serve.frontends.outputs import Outputs
    from inl.serve.job import Job, Prompt


class Client(Protocol):
    """Sends the requests of a front-end to engines. Used by the event loop only."""

    @property
    def names(self) -> Mapping[str, int]:
        """Names of models and adapters -> positions of the models."""

    def identity_of(self, model: str | None) -> str:
        """Digest of what decides which tokens follow a prompt; empty if streams cannot
        go on behind another connection.

        model: as in requests, which may name an adapter.
        """

    @property
    def outputs(self) -> Outputs:
        """Outputs of open requests."""

    def numbers(self, count: int) -> int:
        """Return the first of ``count`` numbers that nothing else has."""

    def send(self, message: ToEngine) -> None:
        """Send a message."""

    async def call(self, number: int, message: ToEngine) -> Any:
        """Send a message and return its reply; raises :class:`ApiError`."""

    async def check_room(self, client: str) -> None:
        """Raise :class:`ApiError` 429 or 503 if no model would admit a call."""


class RemoteModel:
    """A model of the engine's process. Used by the event loop only."""

    def __init__(self, settings: ModelSettings, client: Client) -> None:
        self.name = settings.name
        self._settings = settings
        self._client = client
        self._text: ModelText | None = None
        self._opening = asyncio.Lock()
        # The engine's process knows nothing of errors of texts here.
        self._health = Health(self.name, self._test, self._report)

    def identity_of(self, model: str | None) -> str:
        """That of :class:`Client`."""
        return self._client.identity_of(model)

    async def opened(self) -> ModelText:
        """Return the text side of the model; raises :class:`ApiError` 503."""
        async with self._opening:
            if self._text is None:
                try:
                    self._text = await asyncio.to_thread(_open, self._settings)
                except Exception as error:
                    raise load_failure(self.name, error) from error
            return self._text

    async def _test(self) -> None:
        await asyncio.to_thread((await self.opened()).encode_test)

    def _report(self, problem: str | None) -> None:
        self._client.send(Trouble(self.name, problem))

    async def _encoded(
        self, prompts: Sequence[Prompt]
    ) -> tuple[ModelText, list[EncodedPrompt]]:
        """Return the text side of the model, and encoded prompts."""
        try:
            text = self._text or await self.opened()
            return text, await encoded(text, prompts)
        except Exception as error:
            self._health.judge(error)
            raise

    @asynccontextmanager
    async def generate(self, job: Job, client: str) -> AsyncIterator[Generations]:
        """Submit a job, and end it after the body; raises :class:`ApiError`."""
        text, prompts = await self._encoded(job.prompts)
        generations = RemoteGenerations()
        if job.seen is not None:
            known = await self._known(text, job, client, prompts)
            generations = ResumedGenerations(job.seen, known)
        with self._submitting(text, job, prompts, generations) as handles:
            first = handles[0].request.id
            try:
                generations.answered = await self._client.call(
                    first, _submit(text, job, client, prompts, first)
                )
                yield generations
            finally:
                self._client.send(Leave(first, generations.finished))

    @contextmanager
    def _submitting(
        self,
        text: ModelText,
        job: Job,
        prompts: Sequence[EncodedPrompt],
        generations: RemoteGenerations,
    ) -> Iterator[list[RemoteHandle]]:
        """Receive outputs in the body; yields their handles."""
        first = self._client.numbers(job.completions)
        stopped = partial(self._stopped, first)
        handles = _handles(text, job, prompts, first)
        items = [
            Generation(
                handle,
                text.parser(prompts[at // job.count]),
                stopped,
                text.token_texts,
                first=handles[at - at % job.count],
                call_ids="" if job.origin is None else f"{job.origin.nonce} {at}",
            )
            for at, handle in enumerate(handles)
        ]
        for handle in handles:
            handle.listener = generations.event.set
        try:
            with self._client.outputs.open(handles, stopped):
                generations.start(items, text.token_texts)
                yield handles
        finally:
            generations.close()

    async def _known(
        self,
        text: ModelText,
        job: Job,
        client: str,
        prompts: Sequence[EncodedPrompt],
    ) -> list[KnownOutput]:
        """Return the outputs that a client has events of, at least as far as those.

        From the engine that has generated them, or generated again.
        """
        assert job.seen is not None, "checked by the caller"
        wanted = job.seen.tokens
        if job.options.get("logprobs") is None:
            number = self._client.numbers(1)
            recall = Recall(number, job.engine, job.transcript, len(wanted))
            found: Recalled = await self._client.call(number, recall)
            if all(map(ge, map(len, found.tokens), wanted)):
                pairs = zip(found.tokens, found.cached, strict=True)
                return [KnownOutput(tokens, cached) for tokens, cached in pairs]
        options = {**job.options, "stop": None}
        again = replace(job, options=options, seen=None)  # type: ignore[arg-type]
        generations = RemoteGenerations()
        with self._submitting(text, again, prompts, generations) as handles:
            first = handles[0].request.id
            message = _submit(text, again, client, prompts, first)
            try:
                await self._client.call(first, message)
                while not all(map(has_tokens, handles, wanted)):
                    await generations.event.wait()
                    generations.event.clear()
            finally:
                self._client.send(Leave(first, finished=True))
        return [known_output(*each) for each in zip(handles, wanted, strict=True)]

    def _stopped(self, first: int, handle: RequestHandle) -> None:
        self._client.send(Stop(first, handle.request.id - first))


def _open(settings: ModelSettings) -> ModelText:
    text = ModelText(TextModel(settings.place, settings.context))
    text.warm_up()
    return text


def _submit(
    text: ModelText,
    job: Job,
    client: str,
    prompts: Sequence[EncodedPrompt],
    first: int,
) -> Submit:
    """Return the message of a job. Its stop strings are found here."""
    options = {name: plain(value) for name, value in job.options.items()}
    options.pop("stop", None)
    if options.get("seed") is None:
        # Drawn here, so that another engine can continue the output.
        options["seed"] = random_seed()
    options["stop_ids"] = [*text.stop_ids(options.get("stop_ids", ()), prompts[0])]
    if images := prompts[0].images:
        options["images"] = images
    structure = plain(text.structure_of(job.structure, prompts[0]))
    ids = [list(prompt.ids) for prompt in prompts]
    return Submit(
        first, job.model, client, ids, options, job.count, structure, job.number,
        transcript=job.transcript,
    )  # fmt: skip


def _handles(
    text: ModelText, job: Job, prompts: Sequence[EncodedPrompt], first: int
) -> list[RemoteHandle]:
    try:
        tokenizer = text.tokenizer
    except RequestError:
        if job.options.get("stop"):
            raise
        tokenizer = None
    handles: list[RemoteHandle] = []
    for prompt in prompts:
        for _ in range(job.count):
            request = RemoteRequest(
                first + len(handles),
                list(prompt.ids),
                job.options.get("logprobs"),
                job.options.get("prompt_logprobs"),
            )
            handles.append(RemoteHandle(request, tokenizer, job.options))
    return handles


class RemoteResponses:
    """Stored responses of the engine's process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def put(self, client: str, name: str, data: bytes) -> None:
        """Store a response of a client."""
        number = self._client.numbers(1)
        await self._client.call(number, StoreResponse(number, client, name, data))

    async def get(self, client: str, name: str) -> bytes:
        """Return a response of a client; raises :class:`ApiError` 404."""
        number = self._client.numbers(1)
        message = ReadResponse(number, client, name)
        found: StoredResponse = await self._client.call(number, message)
        return found.data


class RemoteModels:
    """The models of the engine's process, by name."""

    def __init__(self, settings: Sequence[ModelSettings], client: Client) -> None:
        self.all = [RemoteModel(each, client) for each in settings]
        self.default = self.all[0]
        self._client = client

    def find(self, name: str | None) -> RemoteModel:
        """Return a model; raises :class:`ApiError` 404."""
        if name is None:
            return self.default
        names = self._client.names
        if name not in names:
            raise model_not_found(name, names)
        return self.all[names[name]]
