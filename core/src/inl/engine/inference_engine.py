"""InferenceEngine: text in, text out, over any runner."""

from __future__ import annotations

import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from inl.config import EngineConfig
from inl.engine.chat import chat_ids
from inl.engine.core import EngineCore, Stats, StepRecord
from inl.engine.dispatcher import RequestDispatcher
from inl.engine.options import (
    GenerationOptions,
    Prompt,
    make_request,
    only,
    several,
    stop_strings,
)
from inl.engine.request_handle import Completion as Completion
from inl.engine.request_handle import RequestHandle
from inl.engine.step_loop import Waiter, pieces, until_completed
from inl.errors import RequestError, RunnerError
from inl.executor.model_loader import LanguageModel, configure, is_replayed, open_model
from inl.protocol.runner import Runner
from inl.recording.recorder import Recorder
from inl.scheduling.plan import SchedulerConfig
from inl.weights.hub import resolve_model
from inl.weights.progress import Progress
from inl.workers.startup import Restarts, StartedRunner, check_place, run_header, start

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer


class InferenceEngine:
    """Answers prompts with one model on one device.

    Any thread and any asyncio task may call it: they take turns at single steps, and
    share their batches.

    model: from :func:`~inl.executor.model_loader.open_model`. tokenizer: its own by default.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        runner: Runner | None = None,
        progress: Progress | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model = configure(model, self.config)
        self.tokenizer = tokenizer or model.checkpoint.tokenizer()
        self.chat_template = model.checkpoint.chat_template
        if runner is None:
            served = start(model, self.config, progress=progress)
        else:
            served = StartedRunner(runner, "runner", "")
        self.device = served.device
        """Where the runner computes; changes where a lost one is replaced elsewhere."""
        context = min(model.config.max_tokens, served.runner.limits.max_tokens)
        self.context = min(context, self.config.context or context)
        """Most tokens of a prompt and its answer."""
        policy = SchedulerConfig(
            token_budget=self.config.token_budget or served.runner.limits.token_budget,
            max_rows=self.config.max_batch,
            context=self.context,
            eos_ids=frozenset(model.checkpoint.eos_token_ids),
            use_kv_cache=self.config.use_kv_cache,
            prefix_cache=self.config.prefix_cache,
            replay=is_replayed(model),
        )
        restarts = runner is None and self.config.on_worker_loss == "restart"
        try:
            self.recorder = Recorder(
                partial(run_header, model, served), self.config.trace
            )
        except BaseException:
            served.runner.close()
            raise
        self._core = EngineCore(
            served.runner,
            policy,
            on_step=on_step,
            recorder=self.recorder,
            replace=Restarts(self._restart) if restarts else None,
        )
        self._dispatcher = RequestDispatcher(self._core)

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> Self:
        """Open a model's folder, GGUF file or known name; the default model if none.

        Raises :class:`~inl.errors.ModelError` and :class:`~inl.errors.DeviceError`.
        """
        check_place(config or EngineConfig())
        model = open_model(resolve_model(path_or_name))
        return cls(model, config=config, progress=progress, on_step=on_step)

    @property
    def runner(self) -> Runner:
        """What computes the steps; another one after a lost worker was replaced."""
        return self._core.runner

    @property
    def stats(self) -> Stats:
        """Totals since the engine began."""
        return self._core.stats

    def chat_ids(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, by the model's own chat template.

        Raises :class:`RequestError` where the model has no template.
        """
        return chat_ids(self.model, self.chat_template, self.tokenizer, messages)

    # A string is a sequence of strings too: the first overload that fits is meant.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: str, **options: Unpack[GenerationOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[int], **options: Unpack[GenerationOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Any, **options: Unpack[GenerationOptions]
    ) -> Completion | list[Completion]:
        """Answer a prompt, or several at once.

        prompt: a string, token ids, or a list of either (then a list comes back).
        options: see :class:`~inl.engine.options.Options`. Raises
        :class:`~inl.errors.RequestError` before anything is computed if any prompt
        cannot be served.
        """
        prompts, single = several(prompt)
        answers = self._submit_all(prompts, options)
        try:
            while not all(answer.completed for answer in answers):
                self._dispatcher.step()
        finally:
            self._dispatcher.cancel(answers)
        found = [answer.completion() for answer in answers]
        return found[0] if single else found

    def stream(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> Iterator[str]:
        """Yield the answer's text as it comes, never half a character or stop string.

        Closing the iterator cancels the request.
        """
        (answer,) = self._submit_all(only(prompt), options)
        pieces = self._pieces(answer)
        next(pieces)  # begins, so that dropping the iterator unread cancels too
        return pieces

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self, prompt: str, **options: Unpack[GenerationOptions]
    ) -> Completion: ...
    @overload
    async def agenerate(
        self, prompt: Sequence[int], **options: Unpack[GenerationOptions]
    ) -> Completion: ...
    @overload
    async def agenerate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]: ...

    async def agenerate(
        self, prompt: Any, **options: Unpack[GenerationOptions]
    ) -> Completion | list[Completion]:
        """:meth:`generate` for asyncio; tasks that wait at once share their steps.

        Cancelling the task, as a timeout does, cancels its requests.
        """
        prompts, single = several(prompt)
        waiter = Waiter()
        answers = await self._begin(prompts, options, waiter)
        try:
            await until_completed(answers, waiter)
        finally:
            self._dispatcher.cancel(answers)
        found = [answer.completion() for answer in answers]
        return found[0] if single else found

    async def astream(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[str, None]:
        """:meth:`stream` for asyncio; it begins when the first piece is asked for.

        ``aclose`` and cancelling the task that iterates cancel the request.
        """
        waiter = Waiter()
        (answer,) = await self._begin(only(prompt), options, waiter)
        try:
            async for piece in pieces(answer, waiter):
                yield piece
            answer.completion()
        finally:
            self._dispatcher.cancel([answer])

    def submit(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> RequestHandle:
        """Queue a prompt; :meth:`generate` and :meth:`stream` do and drive it.

        options: see :class:`~inl.engine.options.Options`.
        """
        answer = self._prepare(prompt, **options)
        self._dispatcher.submit(answer)
        return answer

    def cancel(self, answer: RequestHandle) -> None:
        """End an answer with what it has so far, unless it has ended.

        Where another thread computes a step just now, that takes effect after it.
        """
        self._dispatcher.cancel([answer])

    def close(self) -> None:
        """Free the device and finish the trace. Closing twice is allowed.

        Answers that are still open end with a :class:`~inl.errors.RunnerError`.
        """
        with self._dispatcher.lock:
            self._dispatcher.fail_all(
                RunnerError("engine: was closed before the answer's end")
            )
            self.runner.close()
        if self.chat_template is not None:
            self.chat_template.close()
        self.model.checkpoint.close()
        self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _restart(self) -> Runner:
        """Start a runner in the place of a lost worker, for the same context."""
        device = self.config.restart_device or self.config.backend
        config = replace(self.config, backend=device, context=self.context)
        served = start(self.model, config)
        self.device = served.device
        self.recorder.begin(partial(run_header, self.model, served))
        return served.runner

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError(
                f"prompt: found {prompt!r}, which has no tokens; needs at least one"
            )
        return ids

    def _check_signs(self, ids: Sequence[int]) -> None:
        """Say what a negative id may be; a request knows of no vocabulary."""
        for place, token in enumerate(ids):
            if isinstance(token, int) and token < 0:
                raise RequestError(
                    f"prompt[{place}]: found token {token}, accepts 0 to "
                    f"{self.runner.limits.vocab - 1}"
                )

    def _prepare(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> RequestHandle:
        """Make and check an answer's request without queuing it."""
        started = time.perf_counter()
        ids = self._encode(prompt)
        try:
            request = make_request(ids, options, room=self.context - len(ids))
        except RequestError:
            self._check_signs(ids)
            raise
        self._core.scheduler.check(request)
        stops = stop_strings(options.get("stop"))
        return RequestHandle(request, self.tokenizer, stops, started)

    def _submit_all(
        self, prompts: Sequence[Prompt], options: GenerationOptions
    ) -> list[RequestHandle]:
        answers: list[RequestHandle] = []
        try:
            for prompt in prompts:
                answers.append(self.submit(prompt, **options))
        except BaseException:
            self._dispatcher.cancel(answers)
            raise
        return answers

    async def _begin(
        self, prompts: Sequence[Prompt], options: GenerationOptions, waiter: Waiter
    ) -> list[RequestHandle]:
        """Queue prompts for the thread that steps, without waiting for it."""
        import asyncio

        answers: list[RequestHandle] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                # A long text takes a while to encode.
                work = partial(self._prepare, prompt, **options)
                answers.append(await asyncio.to_thread(work))
            else:
                answers.append(self._prepare(prompt, **options))
        for answer in answers:
            answer.listener = waiter
        self._dispatcher.submit_async(answers)
        return answers

    def _pieces(self, answer: RequestHandle) -> Iterator[str]:
        try:
            yield ""
            while True:
                if piece := answer.take():
                    yield piece
                if answer.completed:
                    break
                self._dispatcher.step()
            answer.completion()
        finally:
            self._dispatcher.cancel([answer])
