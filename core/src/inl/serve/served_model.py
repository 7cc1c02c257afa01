"""A loaded model: its engine, its prompts and its open requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from inl.engine.options import GenerationOptions
from inl.serve.api_error import as_api_error
from inl.serve.generations import Generation
from inl.serve.job import Conversation, Job, Prompt
from inl.serve.model_text import ModelText, is_forced
from inl.serve.wakeups import Reader, Steps, Wakeups

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.serve.open_call import OpenCall


COMPILING = 32
"""Threads that wait for a grammar; no other work does."""


class ServedModel(ModelText):
    """One engine, and what its model needs to serve requests."""

    def __init__(self, engine: InferenceEngine) -> None:
        super().__init__(engine)
        self.engine = engine
        self._wakeups: Wakeups | None = None
        self._steps: Steps | None = None
        self._compiling = ThreadPoolExecutor(COMPILING, "inl-grammars")

    async def start(self, call: OpenCall, reader: Reader | None = None) -> None:
        """Submit the prompts of an admitted call; raises :class:`ApiError`.

        reader: called after each step, in place of waking
        :meth:`Generations.deltas`.
        """
        started: list[Generation] = []
        job = call.job
        try:
            # A long text takes a while to encode.
            is_encoded = all(isinstance(prompt, list) for prompt in job.prompts)
            prompts = (
                self.encode_all(job.prompts)
                if is_encoded
                else await asyncio.to_thread(self.encode_all, job.prompts)
            )
            call.charge(sum(map(len, prompts)) * job.count)
            listener = self._listener(call.event, reader)
            submit = partial(self._submit_all, call, prompts, listener, started)
            await self._call(submit, in_thread=_has_structure(job))
        except BaseException as error:
            for item in started:
                self.engine.cancel(item.handle)
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise
        call.run(started, self.token_bytes, self.engine.cancel)

    def _listener(
        self, event: asyncio.Event, reader: Reader | None
    ) -> Callable[[], None] | None:
        """Return the listener of handles; ``None`` if a reader reads them."""
        loop = asyncio.get_running_loop()
        if reader is None:
            if self._wakeups is None:
                self._wakeups = Wakeups(loop)
            return partial(self._wakeups.wake, event)
        if self._steps is None:
            self._steps = Steps(loop)
            self.engine.after_step(self._steps.wake)
        self._steps.add(reader)
        return None

    async def _call(self, submit: Callable[[], object], *, in_thread: bool) -> None:
        """Submit prompts; compiling a grammar takes a while."""
        if not in_thread:
            submit()
            return
        loop = asyncio.get_running_loop()
        # The thread goes on if this task is cancelled, and its requests must end.
        work = loop.run_in_executor(self._compiling, submit)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def _submit_all(
        self,
        call: OpenCall,
        prompts: Sequence[Sequence[int]],
        listener: Callable[[], None] | None,
        started: list[Generation],
    ) -> None:
        job = call.job
        for prompt, ids in zip(job.prompts, prompts, strict=True):
            options = self._options(job, prompt, ids)
            options["key"], options["n"] = call.client, job.count
            started += self._submit(options, prompt, ids, listener)

    def _submit(
        self,
        options: GenerationOptions,
        prompt: Prompt,
        ids: Sequence[int],
        listener: Callable[[], None] | None,
    ) -> list[Generation]:
        handle = self.engine.start(ids, listener=listener, **options)
        stop = partial(self.stop_string, options)
        return [
            Generation(
                sample, self.parser(prompt, ids), stop, self.text_tokens, first=handle
            )
            for sample in handle.samples
        ]

    def _options(
        self, job: Job, prompt: Prompt, ids: Sequence[int]
    ) -> GenerationOptions:
        """Return the options of a prompt, with the structure of its output."""
        options: dict[str, Any] = {**job.options}
        if job.model in self.engine.adapters:
            options["adapter"] = job.model
        structure = self.structure_of(job, prompt, ids)
        if structure is not None:
            options["structured"] = structure
        return cast("GenerationOptions", options)


def _has_structure(job: Job) -> bool:
    """Whether a grammar is compiled for a job."""
    return job.structure is not None or any(
        isinstance(prompt, Conversation) and is_forced(prompt) for prompt in job.prompts
    )
