"""A loaded model: its engine, its prompts and its open requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from inl.engine.answers.model_text import EncodedPrompt, ModelText, is_forced
from inl.engine.options import GenerationOptions
from inl.errors import RequestError
from inl.serve.api_error import as_api_error, model_not_found
from inl.serve.generations import Generation
from inl.serve.job import Conversation, Job, Prompt
from inl.serve.open_call import Waiter
from inl.serve.prompt_threads import encoded
from inl.serve.threads import run_to_end
from inl.serve.wakeups import Reader, Steps, Wakeups

if TYPE_CHECKING:
    from inl.adapters.registry import AdapterUse
    from inl.engine.inference_engine import InferenceEngine
    from inl.serve.open_call import OpenCall


COMPILING = 32
"""Threads that wait for a grammar, or check many token ids; no other work does."""

SHORT = 1 << 14
"""Token ids, and values of an option, that the event loop checks, in some
milliseconds at most."""

TEST_KEY = "a test of the server"
"""Key of test requests, which wait for no other key's."""


TEMPERATURE = {"temperature": 1.0}
"""Default of all dialects, for models that recommend none."""


class ServedModel(ModelText):
    """One engine, and what its model needs to serve requests.

    name: of the model itself in requests; other names are those of adapters.
    """

    def __init__(self, engine: InferenceEngine, name: str) -> None:
        super().__init__(engine)
        self.engine, self.name = engine, name
        engine.sampling_defaults = {**TEMPERATURE, **engine.sampling_defaults}
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
            # First, so that unloading it from here on does not change this call.
            use = self._adapter_use(job.model)
            # A long text takes a while to encode.
            prompts = (
                self.encode_all(job.prompts)
                if _is_short(job.prompts)
                else await encoded(self, job.prompts)
            )
            tokens = sum(len(each.ids) for each in prompts)
            call.charge(tokens * job.count)
            listener = self._listener(call, reader)
            submit = partial(self._submit_all, call, prompts, use, listener, started)
            is_long = (
                tokens > SHORT
                or _has_structure(job)
                or _has_long_option(job)
                or bool(job.options.get("images"))
                or any(each.images for each in prompts)
            )
            await self._call(submit, in_thread=is_long)
        except BaseException as error:
            for item in started:
                self.engine.cancel(item.handle)
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise
        call.run(started, self.token_texts, self.engine.cancel)

    async def test(self) -> None:
        """Generate a token; raises what would keep other requests from an answer.

        An encoder computes a sequence instead.
        """
        ids = await asyncio.to_thread(self.encode_test)
        if self.engine.model.encoder is not None:
            compute = self.engine.classify if self.engine.labels else self.engine.embed
            await asyncio.to_thread(compute, [ids])
            return
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # a closed loop
                loop.call_soon_threadsafe(changed.set)

        handle = self.engine.start(
            ids,
            listener=wake,
            max_tokens=1,
            key=TEST_KEY,
            priority=100,
        )
        try:
            while not handle.completed:
                await changed.wait()
                changed.clear()
            handle.completion()
        finally:
            self.engine.cancel(handle)

    def _adapter_use(self, name: str | None) -> AdapterUse | None:
        """Find the adapter of a name; raises :class:`ApiError` 404."""
        if name is None or name == self.name:
            return None
        try:
            return self.engine.use_adapter(name)
        except RequestError as error:
            # It was unloaded after the call had found its model.
            raise model_not_found(name, (self.name, *self.engine.adapters)) from error

    def _listener(
        self, call: OpenCall, reader: Reader | None
    ) -> Callable[[], None] | None:
        """Return the listener of handles; ``None`` if a reader reads them."""
        loop = asyncio.get_running_loop()
        if reader is None:
            if self._wakeups is None:
                self._wakeups = Wakeups(loop)
            return partial(self._wakeups.wake, Waiter(call))
        if self._steps is None:
            self._steps = Steps(loop)
            self.engine.after_step(self._steps.wake)
        self._steps.add(reader)
        return None

    async def _call(self, submit: Callable[[], object], *, in_thread: bool) -> None:
        """Submit prompts; compiling a grammar takes a while, as checking many ids."""
        if not in_thread:
            submit()
            return
        # To its end, also if this task is cancelled: its requests must end.
        await run_to_end(self._compiling, submit)

    def _submit_all(
        self,
        call: OpenCall,
        prompts: Sequence[EncodedPrompt],
        use: AdapterUse | None,
        listener: Callable[[], None] | None,
        started: list[Generation],
    ) -> None:
        job = call.job
        for prompt in prompts:
            options = self._options(job, prompt)
            options["key"], options["n"] = call.client, job.count
            started += self._submit(options, prompt, use, listener, job)

    def _submit(
        self,
        options: GenerationOptions,
        encoded: EncodedPrompt,
        use: AdapterUse | None,
        listener: Callable[[], None] | None,
        job: Job,
    ) -> list[Generation]:
        handle = self.engine.start(
            encoded.ids,
            listener=listener,
            adapter_use=use,
            output_ids=job.output_ids,
            contents=job.contents,
            **options,
        )
        cancel = self.engine.cancel
        return [
            Generation(
                sample, self.parser(encoded), cancel, self.token_texts, first=handle
            )
            for sample in handle.samples
        ]

    def _options(self, job: Job, encoded: EncodedPrompt) -> GenerationOptions:
        """Return the options of a prompt, with the structure of its output."""
        options: dict[str, Any] = {**job.options}
        structure = self.structure_of(job.structure, encoded)
        if structure is not None:
            options["structured"] = structure
        options["stop_ids"] = self.stop_ids(options.get("stop_ids", ()), encoded)
        if images := encoded.images:
            options["images"] = images
        return cast("GenerationOptions", options)


def _is_short(prompts: Sequence[Prompt]) -> bool:
    """Whether prompts are few token ids."""
    ids = [prompt for prompt in prompts if isinstance(prompt, list)]
    return len(ids) == len(prompts) and sum(map(len, ids)) <= SHORT


def _has_long_option(job: Job) -> bool:
    """Whether an option has many values, which are checked one by one."""
    return any(
        len(each) > SHORT for each in job.options.values() if hasattr(each, "__len__")
    )


def _has_structure(job: Job) -> bool:
    """Whether a grammar is compiled for a job."""
    return job.structure is not None or any(
        isinstance(prompt, Conversation) and is_forced(prompt) for prompt in job.prompts
    )
