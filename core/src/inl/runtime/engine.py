"""InferenceEngine: text in, text out, over any runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from inl.errors import RequestError, RunnerError
from inl.runtime.answer import Answer
from inl.runtime.chat import chat_ids
from inl.runtime.config import EngineConfig
from inl.runtime.core import EngineCore, Stats, StepRecord
from inl.runtime.load import LanguageModel, open_model
from inl.runtime.plan import Policy
from inl.runtime.recorder import Recorder
from inl.runtime.request import Event, Reason, Request
from inl.runtime.runner import Runner
from inl.runtime.worker_start import Restarts, Served, run_header, start
from inl.weights.hub import resolve_model
from inl.weights.loader import Progress

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. ``str()`` of it is its text."""

    text: str
    token_ids: tuple[int, ...]
    """Every token of the answer, an end token included."""
    finish_reason: Reason
    """"stop": an end token or a stop string; "length"; "cancelled"."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were there already."""
    first_token_seconds: float = 0.0
    """From the call to the answer's first token."""
    seconds: float = 0.0
    """From the call to the answer's end."""

    def __str__(self) -> str:
        return self.text


class InferenceEngine:
    """Answers prompts with one model on one device. One caller, one thread.

    model: from :func:`~inl.runtime.load.open_model`. tokenizer: its own by default.
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
        self.model = model
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer or model.checkpoint.tokenizer()
        self.chat_template = model.checkpoint.chat_template
        if runner is None:
            served = start(model, self.config, progress=progress)
        else:
            served = Served(runner, "runner", "")
        self.device = served.device
        """Where the runner computes; changes where a lost one is replaced elsewhere."""
        context = min(model.config.max_tokens, served.runner.limits.max_tokens)
        self.context = min(context, self.config.context or context)
        """Most tokens of a prompt and its answer."""
        policy = Policy(
            token_budget=self.config.token_budget,
            max_rows=self.config.max_batch,
            context=self.context,
            eos_ids=frozenset(model.checkpoint.eos_token_ids),
            use_kv_cache=self.config.use_kv_cache,
            prefix_cache=self.config.prefix_cache,
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
        self._answers: dict[int, Answer] = {}

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

    @overload
    def generate(self, prompt: str, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[int], **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], **options: Any
    ) -> list[Completion]: ...

    def generate(self, prompt: Any, **options: Any) -> Completion | list[Completion]:
        """Answer a prompt, or several at once.

        prompt: a string, token ids, or a list of either (then a list comes back).
        options: as for :meth:`submit`. Raises
        :class:`~inl.errors.RequestError` before anything is computed if any prompt
        cannot be served.
        """
        prompts, single = _prompts(prompt)
        answers = self._submit_all(prompts, options)
        try:
            while not all(answer.completed for answer in answers):
                self._step()
        finally:
            self._drop(answers)
        found = [_completion(answer) for answer in answers]
        return found[0] if single else found

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yield the answer's text as it comes, never half a character or stop string.

        Closing the iterator cancels the request.
        """
        (answer,) = self._submit_all(_single(prompt), options)
        pieces = self._pieces(answer)
        next(pieces)  # begins, so that dropping the iterator unread cancels too
        return pieces

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
    ) -> Answer:
        """Queue a prompt; :meth:`generate` and :meth:`stream` do and drive it.

        max_tokens: most tokens to answer with; what is left of the context if
        ``None``. temperature: 0 takes the likeliest token. seed: same seed, same
        answer. stop: text that ends the answer and is not shown. ignore_eos: go on
        past the model's end token.
        """
        ids = self._encode(prompt)
        if max_tokens is None:
            max_tokens = max(self.context - len(ids), 1)
        request = Request(
            ids,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
        )
        answer = Answer(request, self.tokenizer, _stops(stop), time.perf_counter())
        number = self._core.add(request)
        self._answers[number] = answer
        return answer

    def close(self) -> None:
        """Free the device and finish the trace. Closing twice is allowed."""
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
        vocab = self.runner.limits.vocab
        for place, token in enumerate(ids):
            if isinstance(token, int) and not 0 <= token < vocab:
                raise RequestError(
                    f"prompt[{place}]: found token {token}, accepts 0 to {vocab - 1}"
                )
        return ids

    def _submit_all(
        self, prompts: Sequence[Prompt], options: dict[str, Any]
    ) -> list[Answer]:
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                answers.append(self.submit(prompt, **options))
        except BaseException:
            self._drop(answers)
            raise
        return answers

    def _pieces(self, answer: Answer) -> Iterator[str]:
        try:
            yield ""
            while True:
                if piece := answer.take():
                    yield piece
                if answer.completed:
                    break
                self._step()
            _completion(answer)
        finally:
            self._drop([answer])

    def _step(self) -> None:
        for event in self._core.step():
            self._tell(event)

    def _tell(self, event: Event) -> None:
        answer = self._answers.get(event.request)
        if answer is None or answer.completed:
            return
        ended = answer.hear(event, time.perf_counter())
        if answer.stopped and event.reason is None:
            self._core.cancel(event.request, "stop")
        if ended:
            del self._answers[event.request]

    def _drop(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not answer.completed:
                self._answers.pop(answer.request.id, None)
                self._core.cancel(answer.request.id)


def _prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    if isinstance(prompt, str):
        return [prompt], True
    try:
        items = list(prompt)
    except TypeError:
        items = [None]
    if any(isinstance(item, float) or item is None for item in items):
        raise RequestError(
            f"prompt: found {prompt!r:.60}, accepts a string, token ids, "
            "or a list of either"
        )
    if items and all(isinstance(item, str) for item in items):
        return items, False
    if items and all(isinstance(item, (list, tuple)) for item in items):
        return items, False
    return [items], True


def _single(prompt: Prompt) -> list[Prompt]:
    prompts, single = _prompts(prompt)
    if not single:
        raise RequestError(
            f"prompt: found a list of {len(prompts)}, stream takes one prompt"
        )
    return prompts


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    found: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in found:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"stop: found {text!r}, accepts strings that are not empty"
            )
    return found


def _completion(answer: Answer) -> Completion:
    if answer.error is not None:
        kind = type(answer.error)
        raise (kind if issubclass(kind, RunnerError) else RunnerError)(
            f"generation failed: {answer.error}"
        ) from answer.error
    assert answer.reason is not None, "asked for the completion of an open answer"
    request = answer.request
    return Completion(
        text=answer.text,
        token_ids=tuple(answer.token_ids),
        finish_reason=answer.reason,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        first_token_seconds=answer.first_token_seconds,
        seconds=answer.seconds,
    )
