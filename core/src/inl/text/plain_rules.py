"""What the encoders in pure Python share: the part of ``tokenizers`` that is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

CACHED_WORDS: Final = 1 << 14
"""Words whose ids are remembered."""
MAX_ID: Final = 2**32 - 1


class Encoded(NamedTuple):
    """Result of ``encode``."""

    ids: list[int]


class TextFrame(NamedTuple):
    """Ids that are added before and after a text."""

    before: Sequence[int] = ()
    after: Sequence[int] = ()

    def around(self, ids: list[int], add_special_tokens: bool) -> Encoded:
        """Return ``ids`` between those of the frame, if they are asked for."""
        if not add_special_tokens:
            return Encoded(ids)
        return Encoded([*self.before, *ids, *self.after])


class PlainRules:
    """A vocabulary with the interface of ``tokenizers.Tokenizer``.

    ids: id of each token in the vocabulary's spelling, added tokens included.
    """

    def __init__(self, ids: Mapping[str, int], frame: TextFrame | None) -> None:
        self._ids = ids
        self._frame = frame or TextFrame()

    # The parameter is that of ``tokenizers``.
    def get_vocab_size(self, with_added_tokens: bool = True) -> int:  # noqa: ARG002
        """Number of ids."""
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return dict(self._ids)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling."""
        return self._ids.get(token)


def check_text(text: str) -> None:
    """Raise :class:`TypeError` if UTF-8 cannot encode ``text``."""
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise TypeError("text cannot be encoded as UTF-8") from error
