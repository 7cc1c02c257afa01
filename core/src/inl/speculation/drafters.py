"""Drafters: predictions of the next tokens of sequences, which steps then verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from inl.spec.uniforms import uniform

if TYPE_CHECKING:
    from inl.kv.tier import BlockMove
    from inl.scheduling.plan import Chunk
    from inl.scheduling.request import Request

CANDIDATES = 32
"""Newest earlier occurrences of the last two tokens that are compared."""

LONGEST = 16
"""Matches of this length or more are treated alike."""

REPLACED = 2
"""Most tokens in a row that copied text may replace before copying goes on."""

RATES = {0: 0.5, 2: 0.5, 3: 0.6, 4: 0.7, 6: 0.8, 10: 0.9, LONGEST: 0.95}
"""Expected acceptance by the least length of the match; 0 is copying that goes on."""


class DraftQuery(NamedTuple):
    """A sequence whose next tokens are wanted."""

    request: int
    """Id of the request."""
    tokens: Sequence[int]
    """Prompt and output so far; between queries of a request it only grows."""
    limit: int
    """Most tokens to predict."""


class Drafter(Protocol):
    """Predicts the next tokens of sequences.

    Wrong predictions cost time and change no output. Not thread-safe; a scheduler
    calls it between steps.
    """

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        """Return up to ``limit`` predicted token ids for each query; none is allowed.

        The first predicted token follows the last of ``tokens``.
        """

    def forget(self, request: int) -> None:
        """Drop what is stored of a request that has ended; it may be unknown."""

    def close(self) -> None:
        """Free all resources; closing twice is allowed."""


@runtime_checkable
class TapDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the model whose tokens it predicts.

    It follows some requests, from their first token on, and predicts nothing for
    others, which cost it nothing.
    """

    @property
    def followed(self) -> Set[int]:
        """Ids of the requests that it follows."""

    def begin(self, request: Request, start: int) -> None:
        """Follow a request whose tokens from ``start`` on are computed next.

        It need not, where it lacks what it knew of the tokens before ``start``.
        """

    def read_next(self, moves: Sequence[BlockMove], *, is_read: bool) -> None:
        """Prepare for the next step.

        moves: blocks of the cache that are overwritten before it. is_read: whether it
        has tokens of a followed request.
        """

    def observe(self, chunks: Sequence[Chunk]) -> None:
        """Read the hidden states of a step from its runner; outputs are processed."""

    def seconds(self, rows: int, drafts: int) -> float:
        """Return the seconds to predict so many tokens for each of ``rows`` sequences.

        With those to read the hidden states of as many tokens, where they are known.
        """

    def prompt_seconds(self, tokens: int) -> float:
        """Return the seconds to read so many hidden states of a prompt."""


@runtime_checkable
class RatedDrafter(Drafter, Protocol):
    """A cheap drafter that knows how good its predictions are.

    It is asked before every step, where other drafters are only asked if the recent
    acceptance of the sequence makes drafts worth their time.
    """

    def rate(self, request: int) -> float:
        """Return the probability that a token of the last proposal is accepted.

        It is an assumption until it has been observed: the acceptance of a sequence is
        counted for each returned number separately, so there should be few of them.
        """


@runtime_checkable
class TimedDrafter(Drafter, Protocol):
    """A slow drafter whose times are known before it is first asked."""

    def seconds(self, rows: int, drafts: int) -> float:
        """Return the seconds to predict so many tokens for each of ``rows`` sequences.

        Of each it was asked a few tokens ago.
        """

    def prompt_seconds(self, tokens: int) -> float:
        """Return the seconds to read a sequence that it was not asked about before."""


class _Copied:
    """Finds in a sequence the text that its end repeats."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], int] = {}
        self._earlier = [0, 0]
        """Place after the occurrence of the two tokens before each place that precedes
        it; 0 if there is none."""
        self._distance = 0
        """Tokens between the end and what it repeated last; 0 before that."""
        self.matched = 0
        """Tokens that the last prediction was made from."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Store the places after all pairs of tokens but the last."""
        for place in range(len(self._earlier), len(tokens)):
            pair = tokens[place - 2], tokens[place - 1]
            self._earlier.append(self._newest.get(pair, 0))
            self._newest[pair] = place

    def predict(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Return what followed the longest match, the newest of equal ones.

        If it is short, copying goes on after tokens that were replaced.
        """
        start, self.matched = self._longest(tokens)
        if self.matched < 3 and self._goes_on(tokens):
            start, self.matched = len(tokens) - self._distance, 0
        if not start:
            return ()
        self._distance = len(tokens) - start
        found = list(tokens[start : start + count])
        # The text repeats itself: continue with the prediction.
        while len(found) < count:
            found += found[: count - len(found)]
        return found

    def _longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the place after the longest match, and its length, or zeros."""
        best = length = 0
        place = self._newest.get((tokens[-2], tokens[-1]), 0) if tokens[1:] else 0
        for _ in range(CANDIDATES):
            if not place or length == LONGEST:
                break
            matched = 2
            while (
                matched < min(place, LONGEST)
                and tokens[place - 1 - matched] == tokens[-1 - matched]
            ):
                matched += 1
            if matched > length:
                best, length = place, matched
            place = self._earlier[place]
        return best, length

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        """Whether few tokens differ from what was copied before them."""
        last = len(tokens) - 1
        return 0 < self._distance <= last - REPLACED and any(
            tokens[at] == tokens[at - self._distance]
            for at in range(last - REPLACED, last + 1)
        )


class NgramDrafter:
    """Predicts what followed the longest earlier occurrence of the last tokens.

    A match has two tokens or more. Where copied text replaces up to :data:`REPLACED`
    tokens, as a renaming does, the prediction continues after them. Costs no model;
    useful where an output repeats its prompt or itself, as edits of code and summaries
    do. Known as prompt lookup decoding (Saxena, 2023).
    """

    def __init__(self) -> None:
        self._copied: dict[int, _Copied] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        proposals: list[Sequence[int]] = []
        for request, tokens, limit in queries:
            copied = self._copied.setdefault(request, _Copied())
            copied.extend(tokens)
            proposals.append(copied.predict(tokens, limit))
        return proposals

    def rate(self, request: int) -> float:
        matched = self._copied[request].matched
        return RATES[max(least for least in RATES if least <= matched)]

    def forget(self, request: int) -> None:
        self._copied.pop(request, None)

    def close(self) -> None:
        self._copied.clear()


class SyntheticDrafter:
    """Predicts known outputs, each token right with a given probability.

    For benchmarks of verification at a given acceptance: the tokens of the output are
    those of the model. outputs: the output of each prompt, both as tuples of token ids.
    acceptance: probability that a token is predicted right if those before it are.
    Raises ``ValueError`` for an acceptance outside 0 to 1.
    """

    def __init__(
        self,
        outputs: Mapping[tuple[int, ...], Sequence[int]],
        acceptance: float,
        *,
        seed: int = 0,
    ) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance: found {acceptance}, accepts 0 to 1")
        self._texts = {prompt: (*prompt, *outputs[prompt]) for prompt in outputs}
        self._acceptance, self._seed = acceptance, seed
        self._of: dict[int, tuple[int, ...]] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        return [self._predict(query) for query in queries]

    def _predict(self, query: DraftQuery) -> Sequence[int]:
        request, tokens, limit = query
        text = self._of.get(request)
        if text is None:
            given = tuple(tokens)
            matches = [p for p in self._texts if given[: len(p)] == p]
            text = self._texts[max(matches, key=len)] if matches else ()
            self._of[request] = text
        at = len(tokens)
        return [
            token if self._is_right(request, position) else abs(token - 1)
            for position, token in enumerate(text[at : at + limit], start=at)
        ]

    def _is_right(self, request: int, position: int) -> bool:
        return uniform(self._seed + request, position) < self._acceptance

    def forget(self, request: int) -> None:
        self._of.pop(request, None)

    def close(self) -> None:
        self._of.clear()
