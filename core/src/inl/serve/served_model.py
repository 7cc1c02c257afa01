"""A loaded model: its engine, its prompts and its open requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from inl.engine.options import GenerationOptions
from inl.errors import RequestError
from inl.serve.api_error import as_api_error
from inl.serve.generations import Generation, Generations
from inl.serve.generic_tools import with_tools
from inl.serve.job import Conversation, Job, Prompt
from inl.serve.markup import CallMarkup, Markup, ReasoningMarkup, derive
from inl.serve.markup_parser import MarkupParser
from inl.serve.output_parser import OutputParser, PlainParser
from inl.serve.structured import forced_call
from inl.serve.wakeups import Wakeups
from inl.text.measure import check_length

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.serve.admission import Admission, Ticket
    from inl.serve.metrics import ModelMetrics

TAIL = 64
"""Tokens at the end of a prompt that may begin the reasoning."""


class ServedModel:
    """One engine, and what its model needs to serve requests."""

    def __init__(
        self, engine: InferenceEngine, admission: Admission, metrics: ModelMetrics
    ) -> None:
        self.engine = engine
        self._admission = admission
        self._metrics = metrics
        self._wakeups: Wakeups | None = None
        self.markup = Markup(CallMarkup())
        """How the model writes calls and reasoning, once it is warmed up."""

    def warm_up(self) -> None:
        """Build the tokenizer and start the template's process, if it has them."""
        with suppress(RequestError):
            self.engine.tokenizer.encode("a")
        template = self.engine.chat_template
        if template is not None:
            self.markup = derive(template.apply, template.source)

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
        messages = conversation.messages
        variables = dict(conversation.variables)
        tools = () if conversation.tool_choice == "none" else conversation.tools
        if not self.markup.has_tools:
            messages = with_tools(conversation, tools)
        elif tools:
            variables["tools"] = [tool.as_template_value() for tool in tools]
        return self.engine.chat_ids(
            messages,
            continue_final_message=conversation.continue_final,
            **variables,
        )

    async def start(self, job: Job, client: str, ticket: Ticket) -> Generations:
        """Submit the prompts of an admitted job; raises :class:`ApiError`."""
        started: list[Generation] = []
        try:
            # A long text takes a while to encode.
            prompts = await asyncio.to_thread(self._encode_all, job.prompts)
            self._admission.charge(ticket, sum(map(len, prompts)) * job.count)
            event = asyncio.Event()
            submit = partial(self._submit_all, job, client, prompts, event, started)
            await self._call(submit, in_thread=self._has_structure(job))
        except BaseException as error:
            self._cancel(started)
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise
        return Generations(
            started,
            event,
            token_text=self.token_bytes,
            on_begin=partial(self._admission.begun, ticket),
            on_delta=self._metrics.record_delta,
            on_close=partial(self._close, started),
        )

    async def _call(self, submit: Callable[[], object], *, in_thread: bool) -> None:
        """Submit prompts; compiling a grammar takes a while."""
        if self._wakeups is None:
            self._wakeups = Wakeups(asyncio.get_running_loop())
        if not in_thread:
            submit()
            return
        # The thread goes on if this task is cancelled, and its requests must end.
        work = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def _has_structure(self, job: Job) -> bool:
        return job.structure is not None or any(
            isinstance(prompt, Conversation) and _is_forced(prompt)
            for prompt in job.prompts
        )

    def _submit_all(
        self,
        job: Job,
        client: str,
        prompts: Sequence[Sequence[int]],
        event: asyncio.Event,
        started: list[Generation],
    ) -> None:
        for prompt, ids in zip(job.prompts, prompts, strict=True):
            options = self._options(job, prompt)
            options["key"], options["n"] = client, job.count
            started += self._submit(options, prompt, ids, event)

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return [tuple(self.encode(prompt)) for prompt in prompts]

    def _submit(
        self,
        options: GenerationOptions,
        prompt: Prompt,
        ids: Sequence[int],
        event: asyncio.Event,
    ) -> list[Generation]:
        assert self._wakeups is not None, "made by the caller"
        listener = partial(self._wakeups.wake, event)
        handle = self.engine.start(ids, listener=listener, **options)
        stop = partial(self._stop, options)
        return [
            Generation(sample, self._parser(prompt, ids), stop, first=handle)
            for sample in handle.samples
        ]

    def _options(self, job: Job, prompt: Prompt) -> GenerationOptions:
        """Return the options of a prompt, with the structure of its output."""
        options: dict[str, Any] = {**job.options}
        if job.model in self.engine.adapters:
            options["adapter"] = job.model
        structure = job.structure
        if isinstance(prompt, Conversation) and _is_forced(prompt):
            calls = self.markup.calls or CallMarkup()
            structure = forced_call(prompt.tools, prompt.tool_choice, calls)
        if structure is not None:
            options["structured"] = structure
        return cast("GenerationOptions", options)

    def _parser(self, prompt: Prompt, ids: Sequence[int]) -> OutputParser:
        """Return the parser of a prompt's output; texts have no markup."""
        if not isinstance(prompt, Conversation):
            return PlainParser()
        if _is_forced(prompt):
            forced = self.markup.calls or CallMarkup()
            return MarkupParser(forced, None, is_forced=True)
        offered = prompt.tools and prompt.tool_choice != "none"
        calls = self.markup.calls if offered else None
        reasoning = self.markup.reasoning
        if calls is None and reasoning is None:
            return PlainParser()
        return MarkupParser(
            calls,
            reasoning,
            is_reasoning=reasoning is not None and self._has_begun(reasoning, ids),
        )

    def _has_begun(self, reasoning: ReasoningMarkup, ids: Sequence[int]) -> bool:
        """Whether a prompt ends within reasoning."""
        tail = self.engine.tokenizer.decode(ids[-TAIL:], skip_special=False)
        return tail.rfind(reasoning.begin) > tail.rfind(reasoning.end)

    def _stop(self, options: GenerationOptions, ids: list[int]) -> str | None:
        """Return the stop string with which the text of ``ids`` was ended."""
        text = self.engine.tokenizer.decode(ids)
        stop = options.get("stop") or ()
        strings = [stop] if isinstance(stop, str) else stop
        ends = [(text.find(each) + len(each), each) for each in strings if each in text]
        return min(ends)[1] if ends else None

    def _close(self, started: list[Generation]) -> None:
        self._cancel(started)
        for item in started:
            self._metrics.record_end(item)

    def _cancel(self, items: list[Generation]) -> None:
        for item in items:
            if not item.handle.completed:
                self.engine.cancel(item.handle)


def _is_forced(conversation: Conversation) -> bool:
    return conversation.tool_choice not in ("auto", "none")
