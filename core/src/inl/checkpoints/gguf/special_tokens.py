"""Special tokens of a GGUF file: their ids, and their texts for chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.text.gguf_fields import CONTROL
from inl.text.strings import is_strings

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
TURN_ENDS: Final = frozenset(
    (
        "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>",
        "<end_of_turn>", "<turn|>", "<|end_of_turn|>", "<|endofturn|>", "[|endofturn|]",
        "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>",
        "<EOT>",
    )
)  # fmt: skip
"""Control tokens that end a turn in the chat templates of published models."""
HARMONY: Final = frozenset(("<|return|>", "<|call|>"))
"""Tokens of a format in which ``<|end|>`` ends a message, and not the turn."""
GGUF_NAMES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as the format spells it
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
"""Name of a special token in ``tokenizer.ggml.NAME_token_id``, by template variable."""


def vocabulary(metadata: Mapping[str, Any], where: Path) -> Sequence[str]:
    """Return ``tokenizer.ggml.tokens``; empty if the file has none."""
    tokens: Sequence[str] = metadata.get(TOKENS, [])
    if not is_strings(tokens):
        raise CheckpointError(
            f"{where}: {TOKENS}: found {show(tokens)}; accepted: strings"
        )
    return tokens


def special_ids(metadata: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return ``bos_token_id``, and ``eos_token_id`` with the end-of-turn ids.

    Control tokens of a known name end turns where the file names no end of turn.
    """
    tokens = vocabulary(metadata, where)
    ids = {
        name: index
        for name in ("bos", "eos", "eot", "eom")
        if (index := _token_id(metadata, name, len(tokens), where)) is not None
    }
    ends = {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    if "eot" not in ids and not any(tokens[index] in TURN_ENDS for index in ends):
        ends.update(_turn_ends(metadata, tokens))
    return {"bos_token_id": ids.get("bos"), "eos_token_id": sorted(ends)}


def special_tokens(metadata: Mapping[str, Any], where: Path) -> dict[str, str]:
    """Return the texts of the special tokens, by variable of chat templates."""
    tokens = vocabulary(metadata, where)
    return {
        variable: tokens[index]
        for variable, name in GGUF_NAMES.items()
        if (index := _token_id(metadata, name, len(tokens), where)) is not None
    }


def _token_id(
    metadata: Mapping[str, Any], name: str, count: int, where: Path
) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    value = metadata[key]
    if type(value) is not int or not 0 <= value < count:
        raise CheckpointError(
            f"{where}: {key}: found {show(value)}; "
            f"accepted: an id below {count}, the number of tokens"
        )
    return value


def _turn_ends(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Iterator[int]:
    """Yield the ids of control tokens whose texts are known to end turns."""
    types = np.asarray(metadata.get(TYPES, ()))
    if types.ndim != 1 or len(types) != len(tokens):
        return
    ends = {
        text: index
        for index in np.flatnonzero(types == CONTROL).tolist()
        if (text := tokens[index]) in TURN_ENDS
    }
    if ends.keys() >= HARMONY:
        ends.pop("<|end|>", None)
    yield from ends.values()
