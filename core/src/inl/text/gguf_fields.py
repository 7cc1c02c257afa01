"""Tokenizer fields of GGUF metadata, with type checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from inl.errors import CheckpointError
from inl.text.strings import is_strings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TYPES: Final = (0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
"""Values of ``tokenizer.ggml.token_type``."""

DTYPES: Final = {int: "iu", float: "f"}
"""Kinds of the NumPy dtypes whose values are this type of Python's."""


class Fields:
    """Accessor for ``tokenizer.ggml.*``; raises CheckpointError for a wrong type."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where

    def refuse(self, key: str, found: str, accepted: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where}: tokenizer.ggml.{key}: found {found}; accepted: {accepted}"
        )

    def get(self, key: str, kind: type, accepted: str, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if type(value) is not kind:
            self.refuse(key, "nothing" if value is None else f"{value!r:.60}", accepted)
        return value

    def strings(self, key: str) -> Sequence[str]:
        values: Any = self.metadata.get(f"tokenizer.ggml.{key}")
        if not is_strings(values):
            found = "nothing" if values is None else "other values than strings"
            self.refuse(key, found, "strings")
        strings: Sequence[str] = values
        return strings

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, "true or false", default))

    def token(
        self, name: str, tokens: Sequence[str], default: int | None = None
    ) -> str:
        """Return the text of a special token; empty if the file has none."""
        key = f"{name}_token_id"
        if default is None and f"tokenizer.ggml.{key}" not in self.metadata:
            return ""
        return tokens[self.index(key, len(tokens), default)]

    def index(self, key: str, count: int, default: int | None = None) -> int:
        """Return a token id below ``count``."""
        index: int = self.get(key, int, "an id", default)
        if not 0 <= index < count:
            self.refuse(key, str(index), f"an id below {count}")
        return index

    def delimiters(self, tokens: Sequence[str]) -> dict[int, str]:
        """Return the tokens that begin or end texts and turns, by id."""
        keys = [f"{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
        ids = {
            self.index(key, len(tokens))
            for key in keys
            if f"tokenizer.ggml.{key}" in self.metadata
        }
        return {index: tokens[index] for index in ids if tokens[index]}

    def types(self, count: int) -> NDArray[Any]:
        """Return the type of each token, [count] integers."""
        types = self.numbers("token_type", count, int, "0 to 6", [NORMAL] * count)
        invalid = types[~np.isin(types, TYPES)]
        if len(invalid):
            self.refuse("token_type", f"{min(invalid.tolist())!r:.60}", "0 to 6")
        return types

    def scores(self, count: int) -> NDArray[Any]:
        """Return the score of each token, [count] floats."""
        scores = self.numbers("scores", count, float, "numbers")
        if np.isnan(scores).any():
            self.refuse("scores", "nan", "numbers")
        return scores

    def numbers(
        self,
        key: str,
        count: int,
        kind: type,
        accepted: str,
        default: list[Any] | None = None,
    ) -> NDArray[Any]:
        """Return an array with one ``kind`` per token."""
        values = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(values, list | np.ndarray):
            found = "nothing" if values is None else f"{values!r:.60}"
            self.refuse(key, found, accepted)
        if len(values) != count:
            self.refuse(key, f"{len(values)} entries", f"{count}, one for each token")
        if isinstance(values, np.ndarray) and values.dtype.kind in DTYPES[kind]:
            return values
        items = list(values) if isinstance(values, list) else values.tolist()
        other = [item for item in items if type(item) is not kind]
        if other:
            self.refuse(key, f"{other[0]!r:.60}", accepted)
        return np.array(items) if items else np.zeros(0, kind)
