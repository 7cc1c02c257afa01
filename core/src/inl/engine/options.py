"""What callers may ask for, and the forms in which prompts may come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypedDict

from inl.errors import RequestError
from inl.scheduling.request import Request

Prompt = str | Sequence[int]


class GenerationOptions(TypedDict, total=False):
    """How to answer; the same for every way of asking. A missing one changes nothing.

    The order in which they take effect is told by :data:`inl.ops.sample.sample`;
    ``logprobs`` are those before any of them does.
    """

    max_tokens: int | None
    """Most tokens to answer with; what is left of the context if ``None``."""
    temperature: float
    """0, the default, takes the likeliest token; then the next three do nothing."""
    top_k: int
    """Draw from so many of the likeliest tokens; 0 is all."""
    top_p: float
    """Draw from the likeliest tokens that have this much of the probability."""
    min_p: float
    """Draw from tokens with at least this share of the likeliest's probability."""
    repetition_penalty: float
    """Above 1, tokens of prompt and answer are less likely; below, more."""
    presence_penalty: float
    """Taken from the logit of each token of the answer."""
    frequency_penalty: float
    """Taken from it for each time that the answer holds the token."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of single tokens; -100 bans one."""
    logprobs: int | None
    """Tell how likely each token was, and so many of the likeliest, up to 20."""
    seed: int
    """Same seed, same answer."""
    stop: str | Sequence[str] | None
    """Text that ends the answer and is not shown."""
    stop_ids: Collection[int]
    """Tokens that end the answer."""
    ignore_eos: bool
    """Go on past the model's own end tokens."""


def make_request(
    ids: Sequence[int], options: GenerationOptions, *, room: int
) -> Request:
    """Make the request that ``options`` ask for, with ``room`` tokens unless they say.

    Raises :class:`~inl.errors.RequestError` for an option that there is not, or whose
    value is not accepted; needs no model, so a command can check what it was given.
    """
    fields: dict[str, Any] = dict(options)
    if unknown := sorted(set(fields) - set(GenerationOptions.__annotations__)):
        raise RequestError(
            f"options: found {', '.join(unknown)}, accepts "
            f"{', '.join(GenerationOptions.__annotations__)}"
        )
    stop_strings(fields.pop("stop", None))
    if not isinstance(ends := fields.get("stop_ids", ()), Collection):
        raise RequestError(f"stop_ids: found {ends!r:.60}, accepts a list of token ids")
    if fields.get("max_tokens") is None:
        fields["max_tokens"] = max(room, 1)
    return Request(ids, **fields)


def several(prompt: Any) -> tuple[list[Prompt], bool]:
    """Return the prompts of a call, and whether it was a single one.

    Raises :class:`~inl.errors.RequestError` for what is no prompt.
    """
    if isinstance(prompt, str):
        return [prompt], True
    items: list[Any] = [None]
    if not isinstance(prompt, bytes | Mapping):
        with suppress(TypeError):
            items = list(prompt)
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


def only(prompt: Prompt) -> list[Prompt]:
    """Return the one prompt of a call; raises where there are several."""
    prompts, single = several(prompt)
    if not single:
        raise RequestError(
            f"prompt: found a list of {len(prompts)}, stream takes one prompt"
        )
    return prompts


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the strings that end an answer; raises for an empty one."""
    found = (stop,) if isinstance(stop, str) else stop
    if found is None:
        return ()
    # Not an iterator: every prompt of a call looks at them, and the check before.
    if isinstance(found, bytes | Mapping) or not isinstance(found, Collection):
        raise RequestError(
            f"stop: found {found!r:.60}, accepts a string or a list of strings"
        )
    for text in found:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"stop: found {text!r}, accepts strings that are not empty"
            )
    return tuple(found)
