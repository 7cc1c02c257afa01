"""The loop of ``inl chat``: streams answers and keeps the conversation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.cli.answer_output import print_answer, truncation
from inl.cli.chat_input import Lines
from inl.cli.conversation import Content, Conversation, Message
from inl.cli.interrupt import Interrupt
from inl.errors import InlError, RequestError, RunnerError

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.options import GenerationOptions

RunCommand = Callable[["Chat", str], str | None]
"""Runs a line that begins with a slash; returns the text to print."""


class Chat:
    """A conversation with an engine.

    chat_options: arguments of ``chat_ids`` beside the messages.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        interrupt: Interrupt,
        sampling: GenerationOptions,
        conversation: Conversation,
        chat_options: Mapping[str, Any],
    ) -> None:
        if engine.chat_template is None:
            raise RequestError(
                f"{engine.model.name}: the model has no chat template; "
                "try: inl generate --raw PROMPT"
            )
        self.conversation = conversation
        self.open = True
        self._engine, self._interrupt = engine, interrupt
        self._sampling, self._chat_options = sampling, chat_options
        self._most = sampling["max_tokens"] or engine.context
        self._answers = 0
        self._last = ""
        self._images: list[Path] = []
        """Files of images that the next message has."""

    def run(self, lines: Lines, run_command: RunCommand) -> None:
        """Process input line by line until it ends.

        On a terminal an error is printed and the chat continues; with piped input
        errors and Ctrl-C are raised.
        """
        if template := self._engine.chat_template:
            template.start()
        if lines.interactive:
            name, where = self._engine.model.name, self._engine.device
            print(f"{name} on {where}; /help shows the commands")
        for line in lines:
            try:
                with self._interrupt:
                    self._process(line, run_command)
            except (RunnerError, KeyboardInterrupt):
                raise  # the engine is unusable
            except InlError as error:
                if not lines.interactive:
                    raise
                _note(f"{type(error).__name__}: {error}")
            if self._interrupt.stopped and not lines.interactive:
                raise KeyboardInterrupt
            if not self.open:
                return

    def _process(self, line: str, run_command: RunCommand) -> None:
        if line.startswith("/") and not line.startswith("//"):
            if output := run_command(self, line):
                print(output)
            return
        images, self._images = self._images, []
        text = line[1:] if line.startswith("//") else line
        parts = [{"type": "image", "image": path} for path in images]
        self.ask([*parts, {"type": "text", "text": text}] if images else text)

    def attach(self, path: Path) -> tuple[int, int]:
        """Attach the image of a file to the next message; return its height and width.

        Raises :class:`RequestError` for a file, or a model, of no images.
        """
        from inl.images.decoding import ImageDecoder

        model = self._engine.model
        if model.vision is None:
            raise RequestError(f"/image: {model.name} has no vision encoder")
        decoder = ImageDecoder()
        try:
            size = decoder.size(path, "/image")
        finally:
            decoder.close()
        self._images.append(path)
        return size

    def ask(self, content: Content, *, again: bool = False) -> None:
        """Generate the answer to one message; ``again`` samples with another seed.

        If this raises, the conversation is unchanged.
        """
        self.conversation.ask(content)
        try:
            answer = self._answer(self._answers if again else 0)
        except BaseException:
            self.conversation.pop_last("user")
            raise
        if answer:
            self.conversation.answer(answer)
        else:
            self.conversation.pop_last("user")
        self._answers += 1

    def _answer(self, retries: int) -> str:
        context = self._engine.context
        room = context - min(self._most, max(context // 4, 1))
        ids, dropped = self.conversation.fit(self._ids, room)
        if dropped:
            turns = "1 turn" if dropped == 1 else f"{dropped} turns"
            _note(f"(the oldest {turns} no longer fit into {context} tokens)")
        return self._stream(ids, retries)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        return self._engine.chat_ids(messages, **self._chat_options)

    def _stream(self, ids: list[int], retries: int) -> str:
        from inl.engine.prompt_images import without_images

        seed = self._sampling.get("seed")
        options: GenerationOptions = {
            **self._sampling,
            "max_tokens": min(self._most, self._engine.context - len(ids)),
            "seed": None if seed is None else seed + retries,
        }
        _, images = without_images(self.conversation.visible())
        if images:
            options["images"] = images
        accepted = self._accepted
        handle = self._engine.submit(ids, **options)
        shown: list[str] = []
        began = first = time.perf_counter()

        def add(text: str) -> None:
            nonlocal first
            first = first if shown else time.perf_counter()
            shown.append(text)

        try:
            print_answer(self._engine, handle, add)
        except KeyboardInterrupt:
            self._interrupt.reraise_foreign()
        if self._interrupt.stopped:
            _note("(stopped)")
        if note := truncation(handle, len(ids), self._engine.context):
            _note(note)
        tokens = self._interrupt.decode_steps + self._accepted - accepted
        self._measure(len(ids), tokens, began, first)
        return "".join(shown)

    @property
    def _accepted(self) -> int:
        """Drafted tokens that steps have accepted, in addition to one of each step."""
        speculation = self._engine.speculation
        return 0 if speculation is None else speculation.accepted

    def _measure(self, prompt: int, tokens: int, began: float, first: float) -> None:
        decode = time.perf_counter() - first
        speed = f", then {tokens / decode:.1f} tokens/s" if tokens and decode else ""
        self._last = (
            f"last answer: {prompt} prompt tokens, first text after "
            f"{first - began:.2f} s{speed}"
        )

    def stats(self) -> list[str]:
        """Lines of ``/stats``."""
        engine, conversation = self._engine, self.conversation
        turns = conversation.turns
        used = len(self._ids(conversation.visible())) if conversation.messages else 0
        left_out = sum(
            m["role"] == "user" for m in conversation.messages[: conversation.start]
        )
        lines = [
            f"{engine.model.name} on {engine.device}",
            f"{turns} turn{'s'[: turns != 1]}, {left_out} of them no longer in the "
            "context",
            f"{used} of {engine.context} tokens of context in use",
            f"{engine.stats.prefix_hit_tokens} tokens reused from the prefix cache",
        ]
        return lines + ([self._last] if self._last else [])


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
