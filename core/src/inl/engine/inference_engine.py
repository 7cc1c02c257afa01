"""InferenceEngine: text in, text out, on any device."""

from __future__ import annotations

import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from inl.adapters.registry import AdapterRegistry, AdapterUse, apply_adapter
from inl.checkpoints.hub.resolve import resolve_model
from inl.config import AUTOMATIC, EngineConfig
from inl.engine.adapter_loading import AdapterLoading
from inl.engine.answers.chat_answer import ChatAnswer, chat_answer, conversation_of
from inl.engine.answers.model_text import ModelText
from inl.engine.batch import Batch
from inl.engine.block_access import BlockAccess
from inl.engine.block_tiers import identity_of, started_snapshots, started_tiers
from inl.engine.chat import ToolSource, tool_schemas
from inl.engine.cleanup import run_with_cleanup
from inl.engine.core import EngineCore, Stats, StepRecord
from inl.engine.dispatcher import RequestDispatcher
from inl.engine.embedder import Embedder
from inl.engine.encoder_queue import EncoderQueue
from inl.engine.moved_request import MovedRequest as MovedRequest
from inl.engine.options import (
    GenerationOptions,
    Prompt,
    as_prompts,
    as_single_prompt,
    check_one_sample,
    is_conversation,
)
from inl.engine.prefill_role import PrefillRole
from inl.engine.prompt_encoder import PromptEncoder
from inl.engine.request_handle import Completion as Completion
from inl.engine.request_handle import RequestHandle
from inl.engine.request_migration import RequestMigration
from inl.engine.scheduler_setup import scheduler_config
from inl.engine.step_loop import Waiter, text_chunks, until_completed
from inl.engine.text_piece import TextPiece
from inl.engine.text_scores import Classification as Classification
from inl.engine.text_scores import Ranked as Ranked
from inl.engine.text_scores import TextScores
from inl.engine.text_scoring import TextScoring
from inl.errors import InlError, RequestError, RunnerError
from inl.executor.load_plan import configure
from inl.executor.model_loader import LanguageModel, open_model
from inl.guidance.structured import with_kind
from inl.progress import Progress
from inl.protocol.runner import Runner
from inl.recording.recorder import Recorder
from inl.runners.startup import Restarts, StartedRunner, check_place, run_header, start
from inl.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from inl.engine.encoder_load import EncoderLoad
    from inl.guidance.structured import StructuredOutput
    from inl.kv.kv_events import OnKVEvent
    from inl.kv_tiers.state_snapshots import StateSnapshots
    from inl.kv_tiers.tiers import BlockTiers
    from inl.kv_transfer.spans import SequenceContents
    from inl.speculation.drafters import Drafter
    from inl.speculation.planner import Speculation
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

log = logging.getLogger("inl")


class InferenceEngine(AdapterLoading, TextScoring):
    """Generates text with one model on one device.

    Thread-safe, and usable from any asyncio task: concurrent calls share batches. A
    context manager that closes itself.

    model: from :func:`~inl.executor.model_loader.open_model`. tokenizer: used instead
    of the model's own. runner: used instead of one on ``config.backend``; the engine
    closes it. progress: called with (done, total) while weights are loaded. on_step:
    called after each submitted step; it may cancel requests, but not make new ones.
    drafter: used instead of the one that ``config.speculation`` names; the engine
    closes it.
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
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        model = configure(model, self.config)
        is_default = self.config.speculation == AUTOMATIC
        plain = model, self.config
        if is_default:
            plain = model, replace(self.config, speculation=None)
            if runner is not None or drafter is not None:
                self.config = plain[1]
            else:
                from inl.speculation.setup import choose_speculation

                self.config = choose_speculation(model, self.config)
        if self.config.speculation is not None:
            from inl.speculation.setup import check_speculation, with_draft_head

            model = with_draft_head(model, self.config)
            check_speculation(model, self.config)
        self.model = model
        self._encoder = PromptEncoder(model, tokenizer, self.config)
        if runner is None:
            self._encoder.images.enable(self.config)
            try:
                started = start(model, self.config, progress=progress)
            except InlError as error:
                if not is_default or self.config.speculation is None:
                    raise
                log.info("%s: runs without speculation: %s", model.name, error)
                model, self.config = plain
                started = start(model, self.config, progress=progress)
        else:
            started = StartedRunner(runner, "runner", "")
        self.device = started.device
        """Device of the runner; changes if a lost worker is replaced elsewhere."""
        self.dtype = started.dtype
        """Dtype that the runner computes in; empty for a runner that was given."""
        limits = started.runner.limits
        context = min(model.config.max_tokens, limits.max_tokens)
        self.context = min(context, self.config.context or context)
        """Maximum number of tokens of prompt and output."""
        restarts = runner is None and self.config.on_worker_loss == "restart"
        self.tiers: BlockTiers | None = None
        """Tiers of blocks below the device's, with their counts, if there are any."""
        self.snapshots: StateSnapshots | None = None
        """Snapshots of recurrent state, with their counts; ``None`` without it."""
        self.speculation: Speculation | None = None
        """Verification of drafts, with its counts; ``None`` if there is none."""
        try:
            scheduling = scheduler_config(
                model, self.config, limits, context=self.context,
                is_apart=started.runner.has_pinned_memory,
            )  # fmt: skip
            if is_default:  # one entry of a layer may be that of another text
                scheduling = replace(scheduling, recomputes_block=False)
            identity = identity_of(self.config, scheduling, started)
            self.tiers = started_tiers(self.config, scheduling, identity, started)
            self.snapshots = started_snapshots(model, self.config, scheduling, started)
            if is_default and self.config.speculation is not None:
                from inl.speculation.setup import make_default

                self.speculation = make_default(
                    model, self.config, started.runner, scheduling, new_core=EngineCore
                )
            elif self.config.speculation is not None or drafter is not None:
                from inl.speculation.setup import make_speculation

                self.speculation = make_speculation(
                    model, self.config, started.runner, scheduling, drafter,
                    new_core=EngineCore,
                )  # fmt: skip
            self.recorder = Recorder(
                partial(run_header, model, started), self.config.trace
            )
        except BaseException:
            started.runner.close()
            if self.tiers is not None:
                self.tiers.close()
            raise
        self._core = EngineCore(
            started.runner,
            scheduler=Scheduler(
                limits,
                scheduling,
                speculation=self.speculation,
                tier=self.tiers,
                snapshots=self.snapshots,
            ),
            tiers=self.tiers,
            snapshots=self.snapshots,
            on_step=on_step,
            recorder=self.recorder,
            replace=Restarts(self._restart) if restarts else None,
        )
        self._dispatcher = RequestDispatcher(self._core)
        self._encoder.images.share(self._dispatcher, limits, self.device)
        self._sequences = (
            EncoderQueue(self._core, self._dispatcher.lock)
            if model.encoder is not None
            else None
        )
        """Sequences of an encoder; ``None`` for a model that generates."""
        if self._sequences is not None:
            self._sequences.counts.device = self.device
        embedder = Embedder(
            self._dispatcher, self._sequences, context=self.context,
            vocab=limits.vocab, pooling=lambda: model.modules.pooling,
        )  # fmt: skip
        self._texts = TextScores(
            model, self._encoder, embedder.rows, context=self.context
        )
        self._model_text: ModelText | None = None
        self._adapters = AdapterRegistry(
            model, limits, self._core, self._dispatcher.lock
        )
        self._migration = RequestMigration(self._core, self._dispatcher, identity)
        self._role = PrefillRole()
        try:
            for name, path in (self.config.adapters or {}).items():
                self.load_adapter(name, path)
            blocks = BlockAccess(self._core, self._dispatcher.lock, self.tiers)
            self._role.start(self, blocks, identity)
        except BaseException:
            self.close()
            raise
        self.prefill_port, self.remote_prefill = self._role.port, self._role.remote
        """Of an engine with ``EngineConfig.role``, for inspection."""
        self.shared_blocks = self._role.store
        """Blocks of ``EngineConfig.kv_store``, with their counts, if there is one."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> Self:
        """Open a model folder, GGUF file or known name; ``None`` is the default model.

        Raises :class:`~inl.errors.ModelError` and :class:`~inl.errors.DeviceError`.
        """
        check_place(config or EngineConfig())
        model = open_model(resolve_model(path_or_name))
        return cls(model, config=config, progress=progress, on_step=on_step)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ``RequestError`` if the model has none."""
        return self._encoder.tokenizer("tokenizer")

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self._encoder.chat_template

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Sampling options of requests that do not set them; can be replaced.

        By default what the model's ``generation_config.json`` recommends, see
        ``EngineConfig.generation_config``.
        """
        return self._encoder.sampling_defaults

    @sampling_defaults.setter
    def sampling_defaults(self, values: Mapping[str, float]) -> None:
        self._encoder.sampling_defaults = dict(values)

    @property
    def core(self) -> EngineCore:
        """The engine core, for inspection; not thread-safe."""
        return self._core

    @property
    def runner(self) -> Runner:
        """The runner of the steps; another one after a lost worker was replaced."""
        return self._core.runner

    @property
    def stats(self) -> Stats:
        """Totals since the engine started."""
        return self._core.stats

    @property
    def failure(self) -> Exception | None:
        """Why the engine refuses all further requests; ``None`` while it serves."""
        return self._core.failure

    @property
    def stalled_seconds(self) -> float:
        """How long the current step takes already, or open requests wait for one."""
        dispatcher = self._dispatcher
        return max(dispatcher.lock.held_seconds, dispatcher.step_loop.stalled_seconds)

    def chat_ids(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSource] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        trust_control_tokens: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return a conversation's token ids, by the model's own chat template.

        messages: dicts with "role" and "content"; a string is one user message.
        tools: Python functions, whose schema is made from type hints and docstring, or
        JSON schemas of functions. documents: texts with titles.
        add_generation_prompt: whether to begin the assistant's answer; by default
        unless a message is continued. continue_final_message: whether the answer
        continues the last message; a string names the continued field.
        trust_control_tokens: whether a control token in an argument, such as
        ``<|im_end|>``, is encoded as such; by default it is plain text.
        template_kwargs: variables of the template, such as ``enable_thinking=False``.

        Raises :class:`~inl.errors.RequestError` if the model has no template or
        tokenizer or a message cannot be continued,
        :class:`~inl.errors.TemplateError` if the template fails, and
        :class:`~inl.errors.PromptTooLong` for texts far longer than the context.
        """
        return self._encoder.chat_ids(
            messages,
            context=self.context,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            trust_control_tokens=trust_control_tokens,
            **template_kwargs,
        )

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSource] | None = None,
        tool_choice: str = "auto",
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> ChatAnswer:
        """Answer a conversation: text, reasoning and parsed tool calls.

        messages, tools: as for :meth:`chat_ids`; a tool's result is a message with the
        role "tool", and ``answer.message`` the one to append before it. A model whose
        chat template shows no tools gets them as a system message. tool_choice: "auto"
        leaves calls to the model, "none" offers no tools; "required", and the name of a
        tool, make the whole answer one call (needs ``inl-core[guidance]``).
        template_options: further arguments of :meth:`chat_ids`, such as
        ``{"enable_thinking": False}``. options: as for :meth:`generate`, with ``n`` 1;
        ``structured`` is what follows the reasoning. Raises as both.

        Call :meth:`stream` with :meth:`chat_ids` for text as it is generated.
        """
        check_one_sample(options)
        text = self._chat_text()
        conversation = conversation_of(
            messages, tool_schemas(tools or ()), tool_choice, template_options or {}
        )
        (encoded,) = text.encode_all([conversation])
        given = with_kind(options.get("structured"))
        options["structured"] = cast(
            "StructuredOutput | None", text.structure_of(given, encoded)
        )
        options["images"] = encoded.images or options.get("images")
        handle = self._prepare(encoded.ids, self._use(options), **options)
        batch = Batch()
        batch.add(handle)
        run_with_cleanup(
            partial(self._complete, batch), partial(self._dispatcher.cancel, [handle])
        )
        return chat_answer(handle, text.parser(encoded))

    def _chat_text(self) -> ModelText:
        """Return how the model writes calls and reasoning."""
        if self._model_text is None:
            if self.chat_template is None:
                raise RequestError(
                    f"{self.model.name}: has no chat template; generate() takes text"
                )
            text = ModelText(weakref.proxy(self))
            text.warm_up()
            self._model_text = text
        return self._model_text

    # A string is a sequence of strings too; the first matching overload is meant.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: str, **options: Unpack[GenerationOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[int] | Sequence[Mapping[str, Any]],
        **options: Unpack[GenerationOptions],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str]
        | Sequence[Sequence[int]]
        | Sequence[Sequence[Mapping[str, Any]]],
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Any, **options: Unpack[GenerationOptions]
    ) -> Completion | list[Completion]:
        """Generate the completion of a prompt, or of several in one batch.

        prompt: a string, token ids, a conversation (a list of messages, which are dicts
        with "role" and "content"), or a list of one of these, which returns a list.
        options: see :class:`~inl.engine.options.GenerationOptions`. Raises
        :class:`~inl.errors.RequestError`, before anything is computed, if any prompt
        or option is not accepted, its subclass :class:`~inl.errors.QueueFull` if too
        many requests wait already, and :class:`~inl.errors.RunnerError`.
        """
        prompts, single = as_prompts(prompt)
        batch = Batch()
        completions = run_with_cleanup(
            partial(self._generate, batch, prompts, options),
            partial(self._dispatcher.cancel, batch.handles),
        )
        completions += [handle.completion() for handle in batch.firsts]
        return completions[0] if single else completions

    def stream(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> Iterator[TextPiece]:
        """Yield the text of one completion as it is generated.

        Each piece is a string with attributes, see
        :class:`~inl.engine.text_piece.TextPiece`: ``token_ids``, ``logprobs``,
        ``usage``, and in the last one, which may be empty, ``finish_reason``. Only
        whole characters are yielded, and no part of a stop string. Closing or dropping
        the iterator cancels the request.
        """
        check_one_sample(options)
        handle = self._prepare(as_single_prompt(prompt), self._use(options), **options)
        chunks = self._text_chunks(handle)
        next(chunks)  # submits the request in the generator, which cancels it
        return chunks

    # As for generate.
    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self, prompt: str, **options: Unpack[GenerationOptions]
    ) -> Completion: ...
    @overload
    async def agenerate(
        self,
        prompt: Sequence[int] | Sequence[Mapping[str, Any]],
        **options: Unpack[GenerationOptions],
    ) -> Completion: ...
    @overload
    async def agenerate(
        self,
        prompt: Sequence[str]
        | Sequence[Sequence[int]]
        | Sequence[Sequence[Mapping[str, Any]]],
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]: ...

    async def agenerate(
        self, prompt: Any, **options: Unpack[GenerationOptions]
    ) -> Completion | list[Completion]:
        """:meth:`generate` for asyncio; concurrent tasks share their steps.

        Cancelling the task, as a timeout does, cancels its requests.
        """
        prompts, single = as_prompts(prompt)
        if not prompts:
            return []
        waiter, batch = Waiter(self._dispatcher.step_loop.ensure_thread), Batch()
        # Twice, as run_with_cleanup does it.
        try:
            try:
                await self._submit_async(batch, prompts, options, waiter)
                await until_completed(batch, waiter)
            finally:
                self._dispatcher.cancel(batch.handles)
        finally:
            self._dispatcher.cancel(batch.handles)
        completions = [handle.completion() for handle in batch.firsts]
        return completions[0] if single else completions

    async def astream(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[TextPiece, None]:
        """:meth:`stream` for asyncio; the request starts with the first iteration.

        ``aclose``, or cancelling the task that iterates, cancels the request.
        """
        check_one_sample(options)
        prompts, batch = [as_single_prompt(prompt)], Batch()
        waiter = Waiter(self._dispatcher.step_loop.ensure_thread)
        # Twice, as run_with_cleanup does it.
        try:
            try:
                await self._submit_async(batch, prompts, options, waiter)
                async for chunk in text_chunks(batch.handles[0], waiter):
                    yield chunk
                batch.handles[0].completion()
            finally:
                self._dispatcher.cancel(batch.handles)
        finally:
            self._dispatcher.cancel(batch.handles)

    def submit(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> RequestHandle:
        """Queue a prompt and return its handle, without computing anything.

        With ``n`` above 1, ``samples`` of the handle are the handles of all samples.
        It makes progress whenever another call steps the engine; ``result()`` of the
        handle and :meth:`step` do so explicitly. Raises as :meth:`generate`.
        """
        handle = self._prepare(prompt, self._use(options), **options)
        try:
            self._role.fetch([handle])
            for sample in handle.samples:
                self._dispatcher.submit(sample)
            return handle
        except BaseException:
            self._dispatcher.cancel(handle.samples)
            raise

    def start(
        self,
        prompt: Prompt,
        *,
        listener: Callable[[], None] | None,
        adapter_use: AdapterUse | None = None,
        output_ids: Sequence[int] = (),
        captures: bool = False,
        contents: SequenceContents | None = None,
        **options: Unpack[GenerationOptions],
    ) -> RequestHandle:
        """Queue a prompt for the engine's background thread and return its handle.

        Never waits for a step. listener: called after each event of the request, and
        of its further samples, on the thread that steps; ``None`` for those who use
        :meth:`after_step`. adapter_use: from :meth:`use_adapter`, in place of the
        option ``adapter``. output_ids: tokens that an engine of the same model has
        generated with the same options and seed, after which the output goes on.
        captures: see :class:`~inl.scheduling.request.Request`. contents: of the cache
        of that engine; what does not suit is computed again. Raises
        :class:`~inl.errors.RequestError`.
        """
        use = self._use(options) if adapter_use is None else adapter_use
        handle = self._prepare(prompt, use, **options)
        if output_ids:
            self._migration.resume(handle, output_ids, "output_ids")
        if contents is not None:
            self._migration.adopt(handle.request, contents.spans, contents.identity)
        handle.request.captures = captures
        for sample in handle.samples:
            sample.listener = listener
        self._core.check_room(handle.request)
        batch = Batch()
        batch.add(handle)
        submit = partial(self._dispatcher.step_loop.submit, batch)
        self._role.fetch_then(batch.firsts, submit)
        return handle

    def export_request(self, handle: RequestHandle) -> MovedRequest:
        """End a request here, and return all that another engine needs to continue it.

        ``handle`` ends as "cancelled", with the tokens so far. Waits for a step that
        another thread computes. A request that is not queued yet has no tokens.
        Raises :class:`~inl.errors.RequestError` for one that has finished, or whose
        prompt has embeddings.
        """
        return self._migration.export(handle)

    def import_request(
        self,
        moved: MovedRequest,
        *,
        listener: Callable[[], None] | None = None,
        in_background: bool = False,
    ) -> RequestHandle:
        """Continue a request of another engine of the same model, with the same tokens.

        Its blocks are used where this engine has ``EngineConfig.kv_host`` and they suit
        its cache, and the state of a model whose every token changes it without that;
        otherwise tokens are computed again. in_background: by the engine's
        thread, as :meth:`start`, else as :meth:`submit`; listener: of the former.
        Raises :class:`~inl.errors.RequestError` for a request of another model or of
        an adapter that is not loaded here, otherwise as those.
        """
        self._migration.check_model(moved)
        options = cast("GenerationOptions", dict(moved.options))
        handle = self._prepare(list(moved.prompt_ids), self._use(options), **options)
        self._migration.restore(handle, moved)
        if not in_background:
            self._dispatcher.submit(handle)
            return handle
        handle.listener = listener
        batch = Batch()
        batch.add(handle)
        self._dispatcher.step_loop.submit(batch)
        return handle

    def after_step(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener`` after each step of the background thread, on that thread.

        Handles then have what the step has generated, or its error. It replaces the
        one before; ``None`` removes it.
        """
        self._dispatcher.step_loop.after_step = listener

    def report_kv_events(self, on_event: OnKVEvent) -> None:
        """Call ``on_event`` with what happens to shared blocks of the KV cache.

        On the thread that steps, in which it must return at once. Called before the
        first request.
        """
        self._core.scheduler.report_kv_events(on_event)

    def step(self) -> None:
        """Compute one step for all submitted requests."""
        self._dispatcher.step()

    def cancel(self, handle: RequestHandle) -> None:
        """End a request with the output that it has, unless it has finished.

        If another thread is computing a step, the request ends after it.
        """
        self._dispatcher.cancel([handle])

    def abort(self, key: str | None = None) -> int:
        """Cancel all queued requests, or those of one key; returns their number."""
        handles = self._dispatcher.open_handles(key)
        self._dispatcher.cancel(handles)
        return len(handles)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of blocks that are free now.

        Requests that run keep their blocks, which no later request shares.
        """
        freed = self._dispatcher.lock.run(self._core.reset_prefix_cache)
        self._role.reset()
        return freed

    def close(self) -> None:
        """Free the device and finish the trace. Closing twice is allowed.

        Open requests end with a :class:`~inl.errors.RunnerError`.
        """
        self._role.close()
        self._dispatcher.lock.run(self._close_runner)
        self._encoder.close()
        self.model.checkpoint.close()
        if self.model.vision is not None:
            self.model.vision.checkpoint.close()  # may be a file of its own
        if self.speculation is not None:
            self.speculation.drafter.close()
        self.recorder.close()  # last: it raises if the trace has ended early

    def _close_runner(self) -> None:
        error = RunnerError("engine: was closed before the request finished")
        self._dispatcher.close(error)
        self._core.flush_tiers()
        self.runner.close()
        self._encoder.images.close()
        if self.tiers is not None:
            self.tiers.close()

    @property
    def encoder_load(self) -> Mapping[str, EncoderLoad]:
        """What an encoder of "images" or "texts" has computed, if there is one."""
        texts = None if self._sequences is None else self._sequences.counts
        found = {"images": self._encoder.images.load, "texts": texts}
        return {kind: load for kind, load in found.items() if load is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _restart(self) -> Runner:
        """Start a runner in place of a lost worker, with the same context."""
        device = self.config.restart_device or self.config.backend
        config = replace(self.config, backend=device, context=self.context)
        started = start(self.model, config)
        self.device = started.device
        self.recorder.begin(partial(run_header, self.model, started))
        self._adapters.load_all(started.runner)
        return started.runner

    def _prepare(
        self,
        prompt: Prompt,
        use: AdapterUse | None,
        **options: Unpack[GenerationOptions],
    ) -> RequestHandle:
        """Make and check the handle of a request without queuing it."""
        if self._sequences is not None:
            raise RequestError(
                f"{self.model.name}: is an encoder and generates no text; use embed()"
            )
        handle = self._encoder.prepare(
            prompt, context=self.context, vocab=self.runner.limits.vocab, **options
        )
        for sample in handle.samples:
            apply_adapter(use, sample)
            self._core.check(sample.request)
            sample.dispatcher = self._dispatcher
        return handle

    def _generate(
        self, batch: Batch, prompts: Sequence[Prompt], options: GenerationOptions
    ) -> list[Completion]:
        """Return the first completions; those that are left in the batch follow."""
        use = self._use(options)
        for prompt in prompts:
            batch.add(self._prepare(prompt, use, **options))
        return self._complete(batch)

    def _complete(self, batch: Batch) -> list[Completion]:
        """Compute a batch; returns the completions of its first prompts."""
        self._role.fetch(batch.firsts)
        return self._dispatcher.complete(batch)

    async def _submit_async(
        self,
        batch: Batch,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        waiter: Waiter,
    ) -> None:
        """Queue prompts for the background thread, without waiting for a step."""
        import asyncio

        use = self._use(options)
        for prompt in prompts:
            if isinstance(prompt, str) or is_conversation(prompt):
                # Encoding a long text takes a while.
                work = partial(self._prepare, prompt, use, **options)
                handle = await asyncio.to_thread(work)
            else:
                handle = self._prepare(prompt, use, **options)
            for sample in handle.samples:
                sample.listener = waiter
            batch.add(handle)
        self._core.check_room(batch.handles[0].request)
        submit = partial(self._dispatcher.step_loop.submit, batch)
        self._role.fetch_then(batch.firsts, submit)

    def _text_chunks(self, handle: RequestHandle) -> Iterator[TextPiece]:
        # Twice, as run_with_cleanup does it.
        try:
            try:
                self._role.fetch([handle])
                yield from self._dispatcher.text_pieces(handle)
            finally:
                self._dispatcher.cancel([handle])
        finally:
            self._dispatcher.cancel([handle])
