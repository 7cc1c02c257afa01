"""Drafters: predictions of the next tokens of sequences, which steps then verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from inl.scheduling.uniforms import uniform

if TYPE_CHECKING:
    from inl.scheduling.plan import Chunk

NGRAMS = (4, 3, 2)
"""Lengths of the suffixes that :class:`NgramDrafter` searches, in order."""


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
    """A drafter that reads hidden states of the model whose tokens it predicts."""

    def observe(self, chunks: Sequence[Chunk], taps: Any) -> None:
        """Read the hidden states of a step whose outputs have been processed.

        taps: [T, ...] tensor of the backend; the tokens of all chunks in order.
        """


class _Index:
    """Where each n-gram of a sequence occurred last."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        """Position after the last occurrence."""
        self.indexed = 0
        """Leading tokens whose n-grams are stored."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Store the n-grams that end before the last token."""
        for end in range(self.indexed + 1, len(tokens)):
            for size in NGRAMS:
                if end >= size:
                    self.after[tuple(tokens[end - size : end])] = end
        self.indexed = max(len(tokens) - 1, self.indexed)

    def predict(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Return what followed the longest suffix that occurred before."""
        for size in NGRAMS:
            start = self.after.get(tuple(tokens[len(tokens) - size :]))
            if start is not None and len(tokens) > size:
                found = list(tokens[start : start + count])
                # The text repeats itself: continue with the prediction.
                while len(found) < count:
                    found += found[: count - len(found)]
                return found
        return ()


class NgramDrafter:
    """Predicts what followed the last 4, 3 or 2 tokens at their last occurrence.

    Costs no model; useful where an output repeats its prompt or itself, as edits of
    code and summaries do. Known as prompt lookup decoding (Saxena, 2023).
    """

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        proposals: list[Sequence[int]] = []
        for request, tokens, limit in queries:
            index = self._indexes.setdefault(request, _Index())
            index.extend(tokens)
            proposals.append(index.predict(tokens, limit))
        return proposals

    def forget(self, request: int) -> None:
        self._indexes.pop(request, None)

    def close(self) -> None:
        self._indexes.clear()


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
