"""SentencePiece BPE in pure Python, which needs no list of merges.

Building the merges of 262,144 pieces and the tables of ``tokenizers`` takes 2 s and
130 MB. Here the score of a pair is looked up when the pair appears, which gives the
same ids; long texts, and those of a server, are left to the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache
from heapq import heapify, heappop, heappush
from threading import Thread
from typing import TYPE_CHECKING, Final, final

from inl.errors import InlError, MissingPackage
from inl.text.piece_decoder import PieceDecoder
from inl.text.plain_rules import (
    CACHED_WORDS,
    Encoded,
    PlainRules,
    TextFrame,
    check_text,
)
from inl.text.scored_bpe import MAX_PIECE
from inl.text.tokenizer import SPACE

if TYPE_CHECKING:
    import tokenizers

LONG: Final = 1 << 16
"""Characters from which the library encodes: it is 7 times faster than Python with new
words, which then takes 0.2 s, and releases the GIL."""
MANY: Final = 1 << 18
"""Encoded characters from which the library is built beside the engine."""
MAX_BEGINS: Final = 64
"""First characters of added tokens up to which the second is looked at, too."""
MAX_COMPARED: Final = 1 << 12
"""Characters that may be compared with added tokens at each position; Gemma 3 has 500.
"""
MAX_CACHED: Final = 64
"""Characters of the longest word whose ids are remembered."""

WHOLE: Final = re.compile(".+", re.DOTALL)
"""Pattern of texts that are not split."""

Candidate = tuple[float, int, int, int, int, int]
"""Negative score, id of the merged token, negative length of the left one, position,
left id, right id: sorts in the order in which pairs merge."""


@final
class PlainScored(PlainRules):
    """SentencePiece BPE with the interface of ``tokenizers.Tokenizer``.

    tokens: text of each id, each once. ids: id of each text. scores: score of each id
    that merges may produce, ``None`` for others. unknown: token of characters that
    cannot be encoded. space_prefix: whether encoding adds a leading space, which
    decoding removes. special, visible: ids of the tokens that are split off first, not
    empty; decoding can skip the special ones. long: builds the rules for long texts.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float | None],
        *,
        ids: Mapping[str, int],
        unknown: str,
        space_prefix: bool,
        special: Iterable[int] = (),
        visible: Iterable[int] = (),
        frame: TextFrame | None = None,
        long: Callable[[], tokenizers.Tokenizer] | None = None,
    ) -> None:
        super().__init__(ids, frame)
        self._tokens, self._scores = tokens, scores
        self._unknown = self._ids[unknown]
        self._bytes = _byte_ids(self._ids)
        self._prefix = SPACE if space_prefix else ""
        self._special = frozenset(special)
        self._decoder = PieceDecoder(tokens, self._special, strip=space_prefix)
        self._added = AddedTokens(
            tokens[index] for index in (*sorted(self._special), *visible)
        )
        self._plain = False
        self._long = long
        self._built: dict[bool, tokenizers.Tokenizer] = {}
        self._building = set[bool]()
        self._encoded = [0]
        inner = (*self._bytes.values(), self._unknown)
        splits = SPACE in self._ids and all(scores[index] is None for index in inner)
        self._words = word_pattern(tokens, scores) if splits else WHOLE
        self._word_ids = lru_cache(CACHED_WORDS)(self._encode_word)

    @property
    def fast(self) -> bool:
        """Whether added tokens are found in acceptable time; the library is better."""
        return self._added.compared <= MAX_COMPARED

    def without_special(self) -> PlainScored:
        """Return rules to which special tokens are text like any other."""
        rules = copy(self)
        rules._plain = True
        return rules

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """Encode ``text``; raises :class:`TypeError` if UTF-8 cannot encode it."""
        check_text(text)
        if (rules := self._faster(len(text))) is not None:
            (encoding,) = rules.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return Encoded(list(encoding.ids))
        ids: list[int] = []
        at = 0
        for start, stop in self._added.spans(text):
            index = self._ids[text[start:stop]]
            if self._plain and index in self._special:
                continue
            self._encode_plain(text[at:start], ids)
            ids.append(index)
            at = stop
        self._encode_plain(text[at:], ids)
        return self._frame.around(ids, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text; raises :class:`OverflowError` for one above 2**32 - 1."""
        return self._decoder.decode(ids, skip_special_tokens)

    def _faster(self, count: int) -> tokenizers.Tokenizer | None:
        """Return the library's rules if they encode ``count`` characters sooner.

        Long texts wait for them. They are built beside others once many characters were
        encoded, as by a server.
        """
        if self._long is None:
            return None
        if count > LONG:
            return self._library()
        self._encoded[0] += count
        if self._encoded[0] <= MANY or self._plain in self._built:
            return self._built.get(self._plain)
        if self._plain not in self._building:
            self._building.add(self._plain)
            Thread(
                target=self._build_quietly, name="inl-tokenizer", daemon=True
            ).start()
        return None

    def _build_quietly(self) -> None:
        """Build the library's rules; errors are those of the first long text."""
        with suppress(InlError):
            self._library()

    def _library(self) -> tokenizers.Tokenizer | None:
        """Return the library's rules, built on first use; ``None`` without it."""
        if self._long is None:
            return None
        if self._plain not in self._built:
            try:
                rules = self._long()
            except MissingPackage:
                return None
            rules.encode_special_tokens = self._plain
            self._built[self._plain] = rules
        return self._built[self._plain]

    def _encode_plain(self, text: str, ids: list[int]) -> None:
        """Append the ids of a text without added tokens."""
        if not text:
            return
        for word in self._words.findall(self._prefix + text.replace(" ", SPACE)):
            short = len(word) <= MAX_CACHED
            ids += self._word_ids(word) if short else self._encode_word(word)

    def _encode_word(self, word: str) -> list[int]:
        return self._merged(self._symbols(word))

    def _symbols(self, word: str) -> list[int]:
        """Return the ids of characters: of their bytes, or unknown, if they have none.

        Adjacent unknown characters are one symbol. As in the library, it is put behind
        bytes that follow.
        """
        symbols: list[int] = []
        unknown = False
        for letter in word:
            index = self._ids.get(letter)
            if index is not None:
                symbols += [self._unknown, index] if unknown else [index]
                unknown = False
                continue
            values = [self._bytes.get(byte) for byte in letter.encode()]
            found = [each for each in values if each is not None]
            if len(found) == len(values):
                symbols += found
            else:
                unknown = True
        return [*symbols, self._unknown] if unknown else symbols

    def _candidate(self, left: int, right: int, at: int) -> Candidate | None:
        """Return the merge of two symbols, ``None`` if they do not merge."""
        scores, begin, end = self._scores, self._tokens[left], self._tokens[right]
        if len(begin) + len(end) > MAX_PIECE:
            return None
        index = self._ids.get(begin + end)
        if index is None or scores[left] is None or scores[right] is None:
            return None
        score = scores[index]
        return None if score is None else (-score, index, -len(begin), at, left, right)

    def _merged(self, symbols: list[int]) -> list[int]:
        """Merge adjacent symbols, best score first; otherwise in the order of ids.

        Keeps candidates in a heap and symbols in a linked list: O(n log n).
        """
        count = len(symbols)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        pairs = zip(symbols, symbols[1:], range(count - 1), strict=False)
        queue = [each for pair in pairs if (each := self._candidate(*pair))]
        heapify(queue)
        while queue:
            _, new, _, at, left, right = heappop(queue)
            removed = after[at]
            if symbols[at] != left or removed >= count or symbols[removed] != right:
                continue  # stale: one of the two was merged since
            symbols[at], symbols[removed] = new, -1
            after[at] = following = after[removed]
            if following < count:
                before[following] = at
                if each := self._candidate(new, symbols[following], at):
                    heappush(queue, each)
            first = before[at]
            if first >= 0 and (each := self._candidate(symbols[first], new, first)):
                heappush(queue, each)
        return [symbol for symbol in symbols if symbol >= 0]


class AddedTokens:
    """Finds the tokens that are split off a text first: the leftmost, then longest."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        lengths: dict[str, set[int]] = {}
        seconds: dict[str, set[str]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
            seconds.setdefault(text[0], set()).add(text[1:2])
        self._lengths = {
            first: sorted(each, reverse=True) for first, each in lengths.items()
        }
        self.compared = max(map(sum, lengths.values()), default=0)
        """Most characters that are compared at a position."""
        begins = [
            re.escape(first) + ("" if "" in each else f"(?={_any_letter(each)})")
            for first, each in seconds.items()
        ]
        if len(begins) > MAX_BEGINS:
            begins = [_any_letter(seconds)]
        self._first = re.compile("|".join(begins) or r"(?!)")

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the spans of the tokens in ``text``, in order."""
        at = 0
        while match := self._first.search(text, at):
            start = match.start()
            lengths = self._lengths[match.group()]
            parts = (text[start : start + length] for length in lengths)
            found = next((part for part in parts if part in self._texts), "")
            at = start + (len(found) or 1)
            if found:
                yield start, at


def word_pattern(
    tokens: Iterable[str], scores: Iterable[float | None]
) -> re.Pattern[str]:
    """Return a pattern of the parts of a text that merges cannot join.

    A part ends before a space, except after characters that a space follows in a token.
    """
    joined = set[str]()
    for token, score in zip(tokens, scores, strict=True):
        if token.rfind(SPACE) > 0 and score is not None:
            joined.update(re.findall(f"([^{SPACE}]){SPACE}", token))
    inner = f"(?<={_any_letter(joined)}){SPACE}+|" if joined else ""
    return re.compile(f"{SPACE}*(?:{inner}[^{SPACE}]+)+|{SPACE}+")


def _any_letter(letters: Iterable[str]) -> str:
    """Return a pattern of one of the characters, of which there is at least one."""
    return f"[{''.join(map(re.escape, sorted(letters)))}]"


def _byte_ids(ids: Mapping[str, int]) -> dict[int, int]:
    """Return the id of each byte that has a token."""
    found = {byte: ids.get(f"<0x{byte:02X}>") for byte in range(256)}
    return {byte: index for byte, index in found.items() if index is not None}
