"""Encodes prompts, all but the shortest ones on threads that no other work has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from inl.engine.answers.conversation import Conversation, Gap, Tool

if TYPE_CHECKING:
    from inl.engine.answers.conversation import Prompt
    from inl.engine.answers.model_text import EncodedPrompt, ModelText

LONG: Final = 1 << 15
"""Characters of prompts that take more than some milliseconds."""

SHORT: Final = 256
"""Characters of plain texts that take less than to wake a thread."""

VALUE: Final = 16
"""Characters that take as long as a value of a message: a part, or a variable."""

SHORT_PROMPTS: Final = ThreadPoolExecutor(4, "inl-prompts")

LONG_PROMPTS: Final = ThreadPoolExecutor(2, "inl-long-prompts")
"""Of which the requests of others do not wait for a place above."""


async def encoded(text: ModelText, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
    """Return encoded prompts; raises the engine's errors."""
    if is_short(prompts):
        return text.encode_all(prompts)
    threads = LONG_PROMPTS if is_long(prompts) else SHORT_PROMPTS
    work = partial(text.encode_all, prompts)
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def is_short(prompts: Sequence[Prompt]) -> bool:
    """Whether prompts are token ids, or texts of a few characters in all.

    Conversations are not: another process may render them.
    """
    characters = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            characters += len(prompt)
        elif not isinstance(prompt, list):
            return False
    return characters <= SHORT


def is_long(prompts: Sequence[Prompt]) -> bool:
    """Whether prompts have more than :data:`LONG` characters; looks at a part of them.

    Token ids are no characters.
    """
    left = LONG
    waiting: list[Any] = [[each for each in prompts if not isinstance(each, list)]]
    while waiting and left >= 0:
        value = waiting.pop()
        if isinstance(value, str):
            left -= len(value)
            continue
        parts = _parts(value)
        left -= VALUE * max(len(parts), 1)
        if left >= 0:
            waiting += parts
    return left < 0


def _parts(value: Any) -> Sequence[Any]:
    """Return what a value consists of; nothing but texts has characters."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Conversation):
        return (value.messages, value.tools, value.variables)
    if isinstance(value, Gap):
        return (value.prefix, value.suffix, value.files)
    if isinstance(value, Tool):
        return (value.name, value.description, value.parameters)
    return ()
