"""``inl chat``: a conversation with a model."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from inl.cli import arguments
from inl.cli.chat_commands import obey
from inl.cli.chat_input import Lines, open_lines
from inl.cli.conversation import Conversation
from inl.cli.interrupt import Interrupt
from inl.cli.progress import loading_bar
from inl.errors import InlError, RequestError, RunnerError

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.options import GenerationOptions

CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""What an answer may not send to a terminal: it could move the cursor or worse."""


def run(
    model: arguments.Model = None,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    kv_dtype: arguments.KvDtype = "auto",
    tensor_parallel: arguments.TensorParallel = 1,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of one answer.", min=1)
    ] = 1024,
    temperature: arguments.Temperature = 0.7,
    seed: arguments.Seed = None,
    top_k: arguments.TopK = 0,
    top_p: arguments.TopP = 1.0,
    min_p: arguments.MinP = 0.0,
    repetition_penalty: arguments.RepetitionPenalty = 1.0,
    context: Annotated[
        int | None,
        typer.Option(help="Most tokens remembered; the model's own if none.", min=16),
    ] = None,
) -> None:
    """Talk with a model; /help shows the commands, Ctrl-C stops an answer."""
    from inl.config import EngineConfig
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.options import make_request

    sampling: GenerationOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    make_request([0], sampling, room=1)  # refuses before a model is loaded
    interrupt = Interrupt()
    config = EngineConfig(
        backend=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
        max_batch=1,
        context=context,
    )
    engine = InferenceEngine.from_pretrained(
        model, config, progress=loading_bar(), on_step=interrupt.on_step
    )
    with engine:
        Chat(engine, interrupt, sampling, Conversation(system)).talk(open_lines())


class Chat:
    """Asks, shows answers as they come, and keeps the conversation."""

    def __init__(
        self,
        engine: InferenceEngine,
        interrupt: Interrupt,
        sampling: GenerationOptions,
        conversation: Conversation,
    ) -> None:
        if engine.chat_template is None:
            raise RequestError(
                f"{engine.model.name}: has no chat template; "
                "try: inl generate --raw PROMPT"
            )
        self.conversation = conversation
        self.open = True
        self._engine, self._interrupt = engine, interrupt
        self._sampling = sampling
        self._most = sampling["max_tokens"] or engine.context
        self._answers = 0
        self._last = ""

    def talk(self, lines: Lines) -> None:
        """Answer line by line until the end.

        At a terminal what goes wrong is a line, and the chat goes on; from a pipe it
        is raised, so that a script sees it, and so is Ctrl-C.
        """
        if lines.interactive:
            name, where = self._engine.model.name, self._engine.device
            print(f"{name} on {where}; /help shows the commands")
        for line in lines:
            try:
                with self._interrupt:
                    self._hear(line)
            except (RunnerError, KeyboardInterrupt):
                raise  # the engine cannot answer any more
            except InlError as error:
                if not lines.interactive:
                    raise
                _note(f"{type(error).__name__}: {error}")
            if self._interrupt.stopped and not lines.interactive:
                raise KeyboardInterrupt
            if not self.open:
                return

    def _hear(self, line: str) -> None:
        if line.startswith("//"):
            self.ask(line[1:])
        elif line.startswith("/"):
            if said := obey(self, line):
                print(said)
        else:
            self.ask(line)

    def ask(self, text: str, *, again: bool = False) -> None:
        """Answer one message; the same message ``again`` draws with another seed.

        The conversation is as before where this raises.
        """
        self.conversation.ask(text)
        try:
            answer = self._answer(self._answers if again else 0)
        except BaseException:
            self.conversation.take_back("user")
            raise
        if answer:
            self.conversation.answer(answer)
        else:
            self.conversation.take_back("user")
        self._answers += 1

    def _answer(self, retries: int) -> str:
        context = self._engine.context
        room = context - min(self._most, max(context // 4, 1))
        ids, dropped = self.conversation.fit(self._engine.chat_ids, room)
        if dropped:
            turns = "1 turn" if dropped == 1 else f"{dropped} turns"
            _note(f"(the oldest {turns} no longer fit into {context} tokens)")
        return self._stream(ids, retries)

    def _stream(self, ids: list[int], retries: int) -> str:
        seed = self._sampling.get("seed")
        options: GenerationOptions = {
            **self._sampling,
            "max_tokens": min(self._most, self._engine.context - len(ids)),
            "seed": None if seed is None else seed + retries,
        }
        pieces = self._engine.stream(ids, **options)
        plain = sys.stdout.isatty()
        shown: list[str] = []
        began = first = time.perf_counter()
        try:
            for piece in pieces:
                first = first if shown else time.perf_counter()
                shown.append(piece)
                print(piece.translate(CONTROL) if plain else piece, end="", flush=True)
        except KeyboardInterrupt:
            self._interrupt.settle()
        print()
        if self._interrupt.stopped:
            _note("(stopped)")
        self._measure(len(ids), self._interrupt.decode_steps, began, first)
        return "".join(shown)

    def _measure(self, prompt: int, steps: int, began: float, first: float) -> None:
        decode = time.perf_counter() - first
        speed = f", then {steps / decode:.1f} tokens/s" if steps and decode else ""
        self._last = (
            f"last answer: {prompt} tokens of prompt, first text after "
            f"{first - began:.2f} s{speed}"
        )

    def stats(self) -> list[str]:
        """Lines of ``/stats``."""
        engine, talk = self._engine, self.conversation
        used = len(engine.chat_ids(talk.seen())) if talk.messages else 0
        left_out = sum(m["role"] == "user" for m in talk.messages[: talk.start])
        lines = [
            f"{engine.model.name} on {engine.device}",
            f"{talk.turns} turns, {left_out} of them no longer in the context",
            f"{used} of {engine.context} tokens of context in use",
            f"{engine.stats.prefix_hit_tokens} tokens were not computed twice",
        ]
        return lines + ([self._last] if self._last else [])


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
