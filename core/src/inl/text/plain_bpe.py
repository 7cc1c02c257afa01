"""Byte-level BPE in pure Python, used if ``tokenizers`` is not installed.

Gives the same ids as that package, ten times slower. The same patterns are translated
for :mod:`re`, which lacks Unicode categories: :mod:`unicodedata` expands them.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Final, final

from inl.text.plain_rules import (
    CACHED_WORDS,
    MAX_ID,
    Encoded,
    PlainRules,
    TextFrame,
    check_text,
)
from inl.text.spelling import LETTERS, bytes_of

WHITE: Final = (
    "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
)
"""Unicode white space; ``\\s`` of :mod:`re` also matches four control characters."""

CLASS: Final = re.compile(r"\\p\{(\w+)\}|\\([sS])|\\.|\[\^?|\]", re.DOTALL)
"""Matches the parts of a pattern to translate, escapes, and set brackets."""


@final
class PlainBpe(PlainRules):
    """Byte-level BPE with the interface of ``tokenizers.Tokenizer``.

    vocabulary: token in GPT-2's byte letters -> id; ids are unique. added: tokens that
    are split off before the patterns apply. special: ids that :meth:`decode` can skip.
    whole_words: whether a word that is a token is never split. composed: whether text
    is normalized to NFC.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        merges: Iterable[tuple[str, str]],
        patterns: Iterable[str],
        *,
        added: Iterable[str] = (),
        special: Iterable[int] = (),
        frame: TextFrame | None = None,
        whole_words: bool = False,
        composed: bool = False,
    ) -> None:
        super().__init__(vocabulary, frame)
        self._tokens = {index: token for token, index in vocabulary.items()}
        self._ranks = dict(_ranked(vocabulary, merges))
        self._patterns = [re.compile(translated(each)) for each in patterns]
        self._added_tokens = list(added)
        self._added = _any_of(self._added_tokens)
        self._special = frozenset(special)
        self._whole_words, self._composed = whole_words, composed
        self._word_ids = lru_cache(CACHED_WORDS)(self._encode_word)

    def without_special(self) -> PlainBpe:
        """Return rules that split off no special tokens."""
        rules = copy(self)
        ids, special = self._ids, self._special
        rules._added = _any_of(t for t in self._added_tokens if ids[t] not in special)
        return rules

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """Encode ``text``; raises :class:`TypeError` if UTF-8 cannot encode it."""
        check_text(text)
        ids: list[int] = []
        at = 0
        for match in self._added.finditer(text):
            ids += self._encode_plain(text[at : match.start()])
            ids.append(self._ids[match.group()])
            at = match.end()
        ids += self._encode_plain(text[at:])
        return self._frame.around(ids, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text; raises :class:`OverflowError` for one above 2**32 - 1."""
        if any(not 0 <= index <= MAX_ID for index in ids):
            raise OverflowError("an id out of range")
        skipped = self._special if skip_special_tokens else ()
        parts = (bytes_of(self._tokens.get(i)) for i in ids if i not in skipped)
        return b"".join(parts).decode(errors="replace")

    def _encode_plain(self, text: str) -> Iterator[int]:
        """Yield the ids of a text without added tokens."""
        if self._composed:
            text = unicodedata.normalize("NFC", text)
        for word in words_of(text, self._patterns):
            yield from self._word_ids(word)

    def _encode_word(self, word: str) -> list[int]:
        spelled = "".join(map(LETTERS.__getitem__, word.encode()))
        if self._whole_words and spelled in self._ids:
            return [self._ids[spelled]]
        letters = (self._ids.get(letter) for letter in spelled)
        return merged([each for each in letters if each is not None], self._ranks)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _ranked(
    vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield ((left id, right id), (rank, id of the merged token)).

    Raises :class:`ValueError` for a merge of a token that is not in ``vocabulary``.
    """
    for rank, (left, right) in enumerate(merges):
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise ValueError(f"merge {rank}: {token!r:.60} is not a token")
        pair = vocabulary[left], vocabulary[right]
        yield pair, (rank, vocabulary[left + right])


def merged(
    symbols: list[int], ranks: Mapping[tuple[int, int], tuple[int, int]]
) -> list[int]:
    """Merge adjacent symbols in order of rank; equal ranks merge leftmost first.

    Keeps candidate pairs in a heap and symbols in a linked list: O(n log n).
    """
    count = len(symbols)
    after, before = list(range(1, count + 1)), list(range(-1, count - 1))

    def candidate(at: int) -> tuple[int, int, int, int, int] | None:
        if at < 0 or after[at] >= count:
            return None
        left, right = symbols[at], symbols[after[at]]
        merge = ranks.get((left, right))
        return merge and (merge[0], at, left, right, merge[1])

    queue = [each for at in range(count - 1) if (each := candidate(at))]
    heapify(queue)
    while queue:
        _, at, left, right, new = heappop(queue)
        removed = after[at]
        if symbols[at] != left or removed >= count or symbols[removed] != right:
            continue  # stale: one of the two was merged since
        symbols[at], symbols[removed] = new, -1
        after[at] = after[removed]
        if after[at] < count:
            before[after[at]] = at
        for index in (before[at], at):
            if (each := candidate(index)) is not None:
                heappush(queue, each)
    return [symbol for symbol in symbols if symbol >= 0]


def words_of(text: str, patterns: Iterable[re.Pattern[str]]) -> list[str]:
    """Split a text by each pattern in turn."""
    words = [text]
    for pattern in patterns:
        words = [piece for word in words for piece in _split(word, pattern)]
    return words


def _split(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the matches of a pattern and the text between them, in order."""
    at = 0
    for match in pattern.finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        if match.group():
            yield match.group()
        at = match.end()
    if at < len(text):
        yield text[at:]


def translated(pattern: str) -> str:
    """Translate a pattern of the ``tokenizers`` dialect to that of :mod:`re`."""
    in_set = False

    def translate(match: re.Match[str]) -> str:
        nonlocal in_set
        category, white = match.groups()
        if category or white:
            inner = ranges(category) if category else WHITE
            if in_set:
                return inner
            return f"[^{inner}]" if white == "S" else f"[{inner}]"
        if match.group() in ("[", "[^"):
            in_set = True
        elif match.group() == "]":
            in_set = False
        return match.group()

    return CLASS.sub(translate, pattern)


@cache
def ranges(category: str) -> str:
    """Return the inside of a character set: all categories that start so."""
    return "".join(
        f"\\U{first:08x}-\\U{last:08x}"
        for each, first, last in _runs()
        if each.startswith(category)
    )


@cache
def _runs() -> list[tuple[str, int, int]]:
    """Return (category, first, last) of each run of code points, in order."""
    points = groupby(
        range(sys.maxunicode + 1), lambda at: unicodedata.category(chr(at))
    )
    runs = ((category, list(run)) for category, run in points)
    return [(category, run[0], run[-1]) for category, run in runs]
