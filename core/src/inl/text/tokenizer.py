"""Text to token ids and back, over the ``tokenizers`` package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from inl.errors import (
    CheckpointError,
    InlError,
    MissingPackage,
    RequestError,
    TokenizerNotFound,
)
from inl.text.spelling import bytes_of

if TYPE_CHECKING:
    import tokenizers

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""How a vocabulary with byte fallback spells a byte."""


class Spelling(NamedTuple):
    """A byte-level vocabulary without its rules: enough to turn ids into text."""

    tokens: Sequence[str]
    special_ids: frozenset[int]


@final
class Tokenizer:
    """A vocabulary and its rules. Safe to share between threads.

    rules: or what builds them, called when first needed. spelling: of a vocabulary
    whose ids become text without them.
    """

    def __init__(
        self,
        rules: tokenizers.Tokenizer | Callable[[], tokenizers.Tokenizer],
        *,
        where: str = "tokenizer",
        bos_token: str = "",
        eos_token: str = "",
        spelling: Spelling | None = None,
    ) -> None:
        self._given = rules
        self._spelling = spelling
        self._bytes: dict[int, bytes] = {}
        self.where = where
        self.bos_token = bos_token
        self.eos_token = eos_token

    @cached_property
    def _rules(self) -> tokenizers.Tokenizer:
        return self._given() if callable(self._given) else self._given

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a ``tokenizer.json``; raises :class:`CheckpointError` if damaged."""
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError as error:
            raise TokenizerNotFound(
                f"{path}: not found; accepted: a tokenizer.json beside the model"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: cannot be read: {error}; accepted: a file in UTF-8"
            ) from error
        build = library().Tokenizer.from_str
        where = str(path)
        rules = guarded(build, text, where=where, accepted="a tokenizer.json")
        return cls(rules, where=where)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._rules.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: :meth:`decode` leaves them out unless told otherwise."""
        if self._spelling is not None:
            return self._spelling.special_ids
        added = self._rules.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Split ``text`` into ids; ``add_special`` adds what the model begins with.

        A control token spelled in ``text`` becomes that token: templates need it.
        Characters whose bytes the vocabulary lacks are left out, as it is defined.
        Raises :class:`RequestError` for a lone surrogate, which UTF-8 cannot hold.
        """
        try:
            with _fitting(self.where):
                found = self._rules.encode(text, add_special_tokens=add_special)
                return list(found.ids)
        except TypeError as error:
            raise RequestError(
                f"prompt: found {_odd(text)}; accepted: text that UTF-8 can hold"
            ) from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Join ids into text; broken UTF-8 becomes U+FFFD, ids without a token nothing.

        Raises :class:`RequestError` for an id that is no 32-bit number from 0.
        """
        try:
            with _fitting(self.where):
                return self._rules.decode(list(ids), skip_special_tokens=skip_special)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"token ids: found one outside 0 to {2**32 - 1}; accepted: ids from 0"
            ) from error

    def token(self, index: int) -> str | None:
        """Return the vocabulary's spelling of an id; ``None`` where it has none."""
        if self._spelling is not None:
            tokens = self._spelling.tokens
            return tokens[index] if 0 <= index < len(tokens) else None
        return self._rules.id_to_token(index)

    def token_id(self, token: str) -> int | None:
        """Find the id of a token in the vocabulary's own spelling."""
        return self._rules.token_to_id(token)

    @cached_property
    def byte_level(self) -> bool:
        """Whether a text is its tokens' bytes joined, with no other rule."""
        if self._spelling is not None:
            return True
        return _decoder_kind(self._rules) == "ByteLevel"

    def token_bytes(self, index: int) -> bytes:
        """Return what a token adds to a text, where :attr:`byte_level` is true."""
        found = self._bytes.get(index)
        if found is None:
            found = self._bytes[index] = bytes_of(self.token(index))
        return found

    def is_byte(self, index: int) -> bool:
        """Whether a token is one byte by fallback, to be joined with its neighbors."""
        token = self.token(index)
        return token is not None and BYTE_TOKEN.fullmatch(token) is not None


def _odd(text: Any) -> str:
    """Say what keeps a value from being a text."""
    if not isinstance(text, str):
        return type(text).__name__
    at = next((at for at, one in enumerate(text) if "\ud800" <= one <= "\udfff"), 0)
    return f"{text[at : at + 1]!r} at character {at}"


def library() -> Any:
    """Import ``tokenizers``, or raise :class:`MissingPackage` with the install line."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingPackage(
            "tokenizers is not installed, which turns text into tokens. "
            "Try: pip install 'inl-core[text]'"
        ) from error
    return tokenizers


def guarded(build: Any, *args: Any, where: str, accepted: str, **options: Any) -> Any:
    """Call into the library, whose errors have no type of their own."""
    try:
        with _no_panic(where):
            return build(*args, **options)
    except (InlError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: {error}; accepted: {accepted}") from error


@contextmanager
def _fitting(where: str) -> Iterator[None]:
    """Turn what the library finds out about a vocabulary late into an error of ours."""
    try:
        with _no_panic(where):
            yield
    except (InlError, TypeError, OverflowError, MemoryError):
        raise
    except Exception as error:  # the library's errors have no type of their own
        raise CheckpointError(
            f"{where}: {error}; accepted: a vocabulary whose parts fit together"
        ) from error


@contextmanager
def _no_panic(where: str) -> Iterator[None]:
    """Turn a panic in Rust, which is no ``Exception``, into an error of ours."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise CheckpointError(
            f"{where}: {error}; accepted: a vocabulary whose parts fit together"
        ) from error


def _decoder_kind(rules: tokenizers.Tokenizer) -> str | None:
    """Return the type of the decoder, or of the only one in a sequence."""
    if rules.decoder is None:
        return None
    state = json.loads(rules.decoder.__getstate__())
    if state["type"] == "Sequence" and len(state["decoders"]) == 1:
        state = state["decoders"][0]
    return str(state["type"])
