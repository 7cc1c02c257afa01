"""A chat in the terminal: history, streaming, and a context that does not overflow.

pip install "./core[cli]" ./plugins/inl-cpu
python examples/python/chat_app.py                    # the default model
python examples/python/chat_app.py MODEL cuda:0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from inl import EngineConfig, InferenceEngine

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Be brief."}
ROOM = 256
"""Tokens that are left for an answer."""


class Chat:
    """A conversation with a model."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.messages = [SYSTEM]

    def prompt(self) -> list[int]:
        """Encode the conversation; the oldest turns are dropped if it is too long."""
        while True:
            ids = self.engine.chat_ids(self.messages)
            if len(ids) + ROOM <= self.engine.context or len(self.messages) <= 2:
                return ids
            del self.messages[1:3]  # a question and its answer

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer while it is generated, and remember it."""
        self.messages.append({"role": "user", "content": question})
        answer = ""
        for piece in self.engine.stream(self.prompt(), max_tokens=ROOM):
            answer += piece
            yield piece
        self.messages.append({"role": "assistant", "content": answer})


def main(model: str | None = None, device: str = "auto") -> None:
    config = EngineConfig(backend=device, context=2048)
    with InferenceEngine.from_pretrained(model, config) as engine:
        chat = Chat(engine)
        print("> ", end="", flush=True)
        for line in sys.stdin:
            for piece in chat.ask(line.strip()):
                print(piece, end="", flush=True)
            print("\n> ", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
