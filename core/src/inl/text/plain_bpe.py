"""Byte-level BPE with nothing but Python, where ``tokenizers`` is not installed.

Ten times slower than that package and equal to it, by the same patterns: their classes
of characters are spelled out for :mod:`re`, as this Python's Unicode has them.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Final, NamedTuple, final

from inl.text.spelling import LETTERS, bytes_of

WHITE: Final = (
    "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
)
"""White space in Unicode's sense: :mod:`re` has four controls more."""

CLASS: Final = re.compile(r"\\p\{(\w+)\}|\\([sS])|\\.|\[\^?|\]", re.DOTALL)
"""What of a pattern is another in Python, or ends a set of characters."""

WORDS_KEPT: Final = 1 << 14
MOST_ID: Final = 2**32 - 1


class Encoded(NamedTuple):
    """Ids of a text."""

    ids: list[int]


class Frame(NamedTuple):
    """Tokens, by id, that a text begins and ends with."""

    before: Sequence[int] = ()
    after: Sequence[int] = ()


@final
class PlainBpe:
    """A vocabulary's rules, under the names that ``tokenizers.Tokenizer`` has for them.

    vocabulary: token in GPT-2's letters -> id, each id once. added: tokens that are
    found in a text before it is cut. special: ids that :meth:`decode` may leave out.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        merges: Iterable[tuple[str, str]],
        patterns: Iterable[str],
        *,
        added: Iterable[str] = (),
        special: Iterable[int] = (),
        frame: Frame | None = None,
        whole_words: bool = False,
        composed: bool = False,
    ) -> None:
        self._ids = vocabulary
        self._tokens = {index: token for token, index in vocabulary.items()}
        self._ranks = dict(_ranked(vocabulary, merges))
        self._cuts = [re.compile(translated(each)) for each in patterns]
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._special = frozenset(special)
        self._frame = frame or Frame()
        self._whole_words, self._composed = whole_words, composed
        self._word = lru_cache(WORDS_KEPT)(self._merged_word)

    # The package's parameter: here added tokens are in the vocabulary.
    def get_vocab_size(self, with_added_tokens: bool = True) -> int:  # noqa: ARG002
        """Number of ids."""
        return len(self._ids)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token in the vocabulary's spelling."""
        return self._ids.get(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """Ids of ``text``; raises :class:`TypeError` for what UTF-8 cannot hold."""
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise TypeError("not a text of UTF-8") from error
        ids = list(self._frame.before) if add_special_tokens else []
        at = 0
        for found in self._added.finditer(text):
            ids += self._plain(text[at : found.start()])
            ids.append(self._ids[found.group()])
            at = found.end()
        ids += self._plain(text[at:])
        return Encoded([*ids, *self._frame.after] if add_special_tokens else ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; raises :class:`OverflowError` for one that none can be."""
        if any(not 0 <= index <= MOST_ID for index in ids):
            raise OverflowError("an id out of range")
        left_out = self._special if skip_special_tokens else ()
        parts = (bytes_of(self._tokens.get(i)) for i in ids if i not in left_out)
        return b"".join(parts).decode(errors="replace")

    def _plain(self, text: str) -> Iterator[int]:
        """Ids of a text without added tokens."""
        if self._composed:
            text = unicodedata.normalize("NFC", text)
        for word in words_of(text, self._cuts):
            yield from self._word(word)

    def _merged_word(self, word: str) -> list[int]:
        spelled = "".join(map(LETTERS.__getitem__, word.encode()))
        if self._whole_words and spelled in self._ids:
            return [self._ids[spelled]]
        known = (self._ids.get(letter) for letter in spelled)
        return merged([each for each in known if each is not None], self._ranks)


def _ranked(
    vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """(left, right) -> (rank, id of both); raises :class:`ValueError`."""
    for rank, (left, right) in enumerate(merges):
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise ValueError(f"merge {rank}: {token!r:.60} is no token")
        pair = vocabulary[left], vocabulary[right]
        yield pair, (rank, vocabulary[left + right])


def merged(
    symbols: list[int], ranks: Mapping[tuple[int, int], tuple[int, int]]
) -> list[int]:
    """Join neighbors while any have a rank: the lowest first, of these the leftmost."""
    count = len(symbols)
    after, before = list(range(1, count + 1)), list(range(-1, count - 1))

    def candidate(at: int) -> tuple[int, int, int, int, int] | None:
        if at < 0 or after[at] >= count:
            return None
        left, right = symbols[at], symbols[after[at]]
        found = ranks.get((left, right))
        return found and (found[0], at, left, right, found[1])

    queue = [each for at in range(count - 1) if (each := candidate(at))]
    heapify(queue)
    while queue:
        _, at, left, right, new = heappop(queue)
        gone = after[at]
        if symbols[at] != left or gone >= count or symbols[gone] != right:
            continue  # one of the two was joined meanwhile
        symbols[at], symbols[gone] = new, -1
        after[at] = after[gone]
        if after[at] < count:
            before[after[at]] = at
        for place in (before[at], at):
            if (each := candidate(place)) is not None:
                heappush(queue, each)
    return [symbol for symbol in symbols if symbol >= 0]


def words_of(text: str, patterns: Iterable[re.Pattern[str]]) -> list[str]:
    """What the patterns cut a text into, one after the other."""
    words = [text]
    for pattern in patterns:
        words = [piece for word in words for piece in _cut(word, pattern)]
    return words


def _cut(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """What the pattern matches, and what lies between, in order."""
    at = 0
    for found in pattern.finditer(text):
        if found.start() > at:
            yield text[at : found.start()]
        if found.group():
            yield found.group()
        at = found.end()
    if at < len(text):
        yield text[at:]


def translated(pattern: str) -> str:
    """A pattern as :mod:`re` takes it."""
    within = False

    def put(found: re.Match[str]) -> str:
        nonlocal within
        category, white = found.groups()
        if category or white:
            inner = ranges(category) if category else WHITE
            if within:
                return inner
            return f"[^{inner}]" if white == "S" else f"[{inner}]"
        if found.group() in ("[", "[^"):
            within = True
        elif found.group() == "]":
            within = False
        return found.group()

    return CLASS.sub(put, pattern)


@cache
def ranges(category: str) -> str:
    """Characters of a general category, or of all that begin so, within brackets."""
    return "".join(
        f"\\U{first:08x}-\\U{last:08x}"
        for each, first, last in _runs()
        if each.startswith(category)
    )


@cache
def _runs() -> list[tuple[str, int, int]]:
    """(category, first, last) of neighboring characters, in order."""
    points = groupby(
        range(sys.maxunicode + 1), lambda at: unicodedata.category(chr(at))
    )
    found = ((category, list(run)) for category, run in points)
    return [(category, run[0], run[-1]) for category, run in found]
