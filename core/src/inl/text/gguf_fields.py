"""The fields of GGUF metadata that describe a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from inl.errors import CheckpointError
from inl.text.strings import Strings, is_strings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TYPES: Final = (0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
"""Values of ``tokenizer.ggml.token_type``."""


class Fields:
    """``tokenizer.ggml.*`` with checked types."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where

    def refuse(self, key: str, found: str, accepted: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where}: tokenizer.ggml.{key}: found {found}; accepted: {accepted}"
        )

    def get(self, key: str, kind: type, accepted: str, default: Any = None) -> Any:
        found = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if type(found) is not kind:
            self.refuse(key, "nothing" if found is None else f"{found!r:.60}", accepted)
        return found

    def strings(self, key: str) -> Sequence[str]:
        found = self.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(found, Strings):
            return found
        values: list[Any] = self.get(key, list, "strings")
        if not is_strings(values):
            self.refuse(key, "other values than strings", "strings")
        return values

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, "true or false", default))

    def token(
        self, name: str, tokens: Sequence[str], default: int | None = None
    ) -> str:
        """Return the text of a special token; empty where the file names none."""
        key = f"{name}_token_id"
        if default is None and f"tokenizer.ggml.{key}" not in self.metadata:
            return ""
        return tokens[self.index(key, len(tokens), default)]

    def index(self, key: str, count: int, default: int | None = None) -> int:
        """An id of one of ``count`` tokens."""
        found: int = self.get(key, int, "an id", default)
        if not 0 <= found < count:
            self.refuse(key, str(found), f"an id below {count}")
        return found

    def ends(self, tokens: Sequence[str]) -> dict[int, str]:
        """Tokens, by id, that begin or end texts and turns."""
        keys = [f"{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
        found = {
            self.index(key, len(tokens))
            for key in keys
            if f"tokenizer.ggml.{key}" in self.metadata
        }
        return {index: tokens[index] for index in found if tokens[index]}

    def types(self, count: int) -> list[int]:
        found = self.numbers("token_type", [NORMAL] * count)
        odd = [one for one in found if one not in TYPES]
        if odd:
            self.refuse("token_type", f"{odd[0]!r:.60}", "0 to 6")
        return found

    def scores(self, count: int) -> list[float]:
        found = self.numbers("scores", None, count)
        odd = [one for one in found if type(one) is not float or math.isnan(one)]
        if odd:
            self.refuse("scores", f"{odd[0]!r:.60}", "numbers")
        return found

    def numbers(
        self, key: str, default: list[Any] | None, count: int | None = None
    ) -> list[Any]:
        """A list with an entry for each token."""
        found: list[Any] = self.get(key, list, "numbers", default)
        count = len(default) if default is not None else count
        if len(found) != count:
            self.refuse(key, f"{len(found)} entries", f"{count}, one for each token")
        return found
