"""Tokenizer: encodes text to token ids and decodes them, using ``tokenizers``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from inl.bounded_json import parse_json
from inl.errors import (
    CheckpointError,
    InlError,
    MissingPackage,
    RequestError,
)
from inl.garbage_collection import gc_disabled
from inl.install_command import install_command
from inl.text.spelling import bytes_of

if TYPE_CHECKING:
    import tokenizers

SHORT: Final = 2048
"""Characters, or ids, up to which a call is faster than one that releases the GIL."""

SPACE: Final = "\u2581"
"""Spelling of a space in a vocabulary of SentencePiece's kind."""

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""Token of a single byte in a vocabulary with byte fallback."""


class Spelling(NamedTuple):
    """Tokens of a vocabulary, which decode without its merge rules.

    decode: decodes ids, leaving out the special ones if its second argument is true,
    of tokens with U+2581 for a space; ``None`` for byte-level tokens.
    """

    tokens: Sequence[str]
    special_ids: frozenset[int]
    decode: Callable[[Sequence[int], bool], str] | None = None


@final
class Tokenizer:
    """A vocabulary with its encoding rules. Thread-safe.

    rules: a ``tokenizers.Tokenizer``, or a function that builds it on first use.
    where: prefix of error messages. spelling: tokens of the vocabulary, so that
    decoding does not build the rules. fill_ids: ids of
    :class:`~inl.text.fill_in_middle.FillTokens` that the model's file names.
    """

    def __init__(
        self,
        rules: tokenizers.Tokenizer | Callable[[], tokenizers.Tokenizer],
        *,
        where: str = "tokenizer",
        bos_token: str = "",
        eos_token: str = "",
        spelling: Spelling | None = None,
        fill_ids: Mapping[str, int] | None = None,
    ) -> None:
        self._source = rules
        self._spelling = spelling
        self._bytes: dict[int, bytes] = {}
        self.where = where
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.fill_ids = dict(fill_ids or {})

    @cached_property
    def rules(self) -> tokenizers.Tokenizer:
        """The underlying tokenizer, built on first access."""
        if not callable(self._source):
            return self._source
        with gc_disabled():
            return self._source()

    def prepare(self) -> None:
        """Build what :meth:`encode` needs, which its first call does otherwise."""
        _ = self.rules

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.rules.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which :meth:`decode` skips by default."""
        if self._spelling is not None:
            return self._spelling.special_ids
        added = self.rules.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the control tokens."""
        texts = (self.token(index) for index in sorted(self.special_ids))
        return tuple(text for text in texts if text)

    @cached_property
    def _plain_rules(self) -> tokenizers.Tokenizer:
        """Rules to which control tokens are text like any other."""
        rules: tokenizers.Tokenizer
        if hasattr(self.rules, "without_special"):
            rules = self.rules.without_special()
            return rules
        rules = _copied(self.rules)
        rules.encode_special_tokens = True
        return rules

    def encode(
        self, text: str, add_special: bool = True, *, plain: bool = False
    ) -> list[int]:
        """Encode ``text``; ``add_special`` adds the model's BOS and EOS tokens.

        Control tokens written in ``text`` are encoded as such, as chat templates need;
        with ``plain`` as the text that they are written with.
        Characters whose bytes are not in the vocabulary are dropped. Other threads run
        while a long text is encoded.
        Raises :class:`RequestError` for a lone surrogate, which UTF-8 cannot encode.
        """
        try:
            with _library_errors(self.where):
                rules = self._plain_rules if plain else self.rules
                if len(text) > SHORT and hasattr(rules, "encode_batch_fast"):
                    # Unlike encode(), it releases the GIL.
                    (encoding,) = rules.encode_batch_fast(
                        [text], add_special_tokens=add_special
                    )
                else:
                    encoding = rules.encode(text, add_special_tokens=add_special)
                return list(encoding.ids)
        except TypeError as error:
            check_encodable(text)
            raise RequestError(
                f"prompt: found {type(text).__name__}; accepted: text"
            ) from error

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the ids of a pair of texts, and the kind of each: 0 or 1.

        Raises :class:`RequestError` for a lone surrogate, and for a vocabulary whose
        rules have no pairs.
        """
        for text in (first, second):
            check_encodable(text)
        if hasattr(self.rules, "without_special"):
            raise RequestError(
                f"{self.where}: has no rules for pairs of texts; pass token ids"
            )
        with _library_errors(self.where):
            encoding = self.rules.encode(first, second)
        return list(encoding.ids), list(encoding.type_ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode ids; invalid UTF-8 becomes U+FFFD, ids without a token are dropped.

        Raises :class:`RequestError` for an id outside 0 to 2**32 - 1.
        """
        try:
            with _library_errors(self.where):
                if self._spelling is not None and self._spelling.decode is not None:
                    return self._spelling.decode(ids, skip_special)
                if len(ids) <= SHORT or not hasattr(self.rules, "decode_batch"):
                    return self.rules.decode(
                        list(ids), skip_special_tokens=skip_special
                    )
                (text,) = self.rules.decode_batch(
                    [list(ids)], skip_special_tokens=skip_special
                )
                return text
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"token ids: found one outside 0 to {2**32 - 1}; accepted: ids from 0"
            ) from error

    def token(self, index: int) -> str | None:
        """Return the token of an id in the vocabulary's spelling, or ``None``."""
        if self._spelling is not None:
            tokens = self._spelling.tokens
            return tokens[index] if 0 <= index < len(tokens) else None
        return self.rules.id_to_token(index)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling, or ``None``."""
        return self.rules.token_to_id(token)

    @cached_property
    def byte_level(self) -> bool:
        """Whether decoding is just the concatenation of the tokens' bytes."""
        if self._spelling is not None:
            return self._spelling.decode is None
        return _decoder_kind(self.rules) == "ByteLevel"

    @cached_property
    def marks_spaces(self) -> bool:
        """Whether tokens have U+2581 for a space, and may be bytes (BYTE_TOKEN)."""
        if self._spelling is not None:
            return self._spelling.decode is not None
        decoder = self.rules.decoder
        if decoder is None:
            return False
        state = parse_json(decoder.__getstate__(), "decoder")
        return SPACE in json.dumps(state, ensure_ascii=False)

    def token_bytes(self, index: int) -> bytes:
        """Return the bytes of a token, empty for an unknown id.

        Valid only if :attr:`byte_level` is true.
        """
        data = self._bytes.get(index)
        if data is None:
            token = self.token(index)
            if token is None:
                return b""
            data = self._bytes[index] = bytes_of(token)
        return data

    def is_byte(self, index: int) -> bool:
        """Return whether a token is a single byte of the byte fallback."""
        token = self.token(index)
        return token is not None and BYTE_TOKEN.fullmatch(token) is not None


def check_encodable(text: Any) -> None:
    """Raise :class:`RequestError` for a string with a lone surrogate."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"prompt: found {text[error.start]!r} at character {error.start}; "
            "accepted: text that UTF-8 can encode"
        ) from error


def library() -> Any:
    """Import ``tokenizers``, or raise :class:`MissingPackage` with the install line."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingPackage(
            "tokenizers, which encodes text, is not installed. "
            f"Try: {install_command('inl-core[text]')}"
        ) from error
    return tokenizers


def _copied(rules: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a copy that shares the vocabulary: a whole one takes up to 0.4 s."""
    lib = library()
    copy: tokenizers.Tokenizer = lib.Tokenizer(rules.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(rules, part)) is not None:
            setattr(copy, part, value)
    if rules.truncation is not None:
        copy.enable_truncation(**rules.truncation)
    if rules.padding is not None:
        copy.enable_padding(**rules.padding)
    added = rules.get_added_tokens_decoder()
    for special, ids in groupby(sorted(added), key=lambda index: added[index].special):
        add = copy.add_special_tokens if special else copy.add_tokens
        add([added[index] for index in ids])
    if _shown(copy) == _shown(rules):
        return copy
    # A file may give added tokens other ids than the library would.
    whole: tokenizers.Tokenizer = lib.Tokenizer.from_str(rules.to_str())
    return whole


def _shown(rules: tokenizers.Tokenizer) -> dict[int, str]:
    """Return the added tokens with all that they say."""
    return {id_: repr(one) for id_, one in rules.get_added_tokens_decoder().items()}


def guarded(build: Any, *args: Any, where: str, accepted: str, **options: Any) -> Any:
    """Call a builder of the library and convert its errors to CheckpointError."""
    try:
        with _no_panic(where):
            return build(*args, **options)
    except (InlError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: {error}; accepted: {accepted}") from error


@contextmanager
def _library_errors(where: str) -> Iterator[None]:
    """Convert errors about an inconsistent vocabulary to CheckpointError."""
    try:
        with _no_panic(where):
            yield
    except (InlError, TypeError, OverflowError, MemoryError):
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"{where}: {error}; accepted: a consistent vocabulary"
        ) from error


@contextmanager
def _no_panic(where: str) -> Iterator[None]:
    """Convert a Rust panic, which is not an ``Exception``, to CheckpointError."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise CheckpointError(
            f"{where}: {error}; accepted: a consistent vocabulary"
        ) from error


def _decoder_kind(rules: tokenizers.Tokenizer) -> str | None:
    """Return the type of the decoder; for a sequence of one, that of its element."""
    if rules.decoder is None:
        return None
    state = parse_json(rules.decoder.__getstate__(), "decoder")
    if state["type"] == "Sequence" and len(state["decoders"]) == 1:
        state = state["decoders"][0]
    return str(state["type"])
