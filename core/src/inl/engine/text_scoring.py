"""Methods of an engine that compute embeddings, classes and scores of whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.engine.options import as_prompts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.checkpoints.sentence_transformers import Prompts
    from inl.engine.text_scores import Classification, Ranked, TextScores


class TextScoring:
    """Base of :class:`~inl.engine.inference_engine.InferenceEngine`."""

    _texts: TextScores

    def embed(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> NDArray[np.float32]:
        """Return embeddings of texts or lists of token ids, float32 [n, H].

        One text, or one list of token ids, is one row: ``embed("text")[0]``. Hidden
        states are pooled as the model's files say. By default rows have length 1, and
        are the mean of an encoder's states, or of a model that generates the state
        after the last token, as its head would read it. Computed in batches, in turns
        with the steps that generate. dimensions: keeps the first ones, of length 1
        again. prompt_name: one of the prompts of sentence-transformers, written before
        each text. Raises :class:`~inl.errors.RequestError` for what cannot be encoded,
        otherwise as :meth:`generate`.
        """
        texts, _ = as_prompts(prompts)
        return self._texts.embed(texts, dimensions=dimensions, prompt_name=prompt_name)

    def classify(
        self,
        texts: str | Sequence[str | Sequence[int]],
        seconds: str | Sequence[str] | None = None,
    ) -> list[Classification]:
        """Return the class of each text, by a model with a head that classifies.

        seconds: second text of each pair. Raises :class:`~inl.errors.RequestError`.
        """
        firsts, _ = as_prompts(texts)
        return self._texts.classify(
            firsts, [seconds] if isinstance(seconds, str) else seconds
        )

    def score(
        self, firsts: Sequence[str], seconds: Sequence[str]
    ) -> NDArray[np.float32]:
        """Return the score of each pair of texts, float32 [n].

        By a cross-encoder, or as the cosine of embeddings. Raises as :meth:`embed`.
        """
        return self._texts.score(firsts, seconds)

    def rank(
        self, query: str, documents: Sequence[str], *, top: int | None = None
    ) -> list[Ranked]:
        """Return documents by descending :meth:`score` for a query.

        top: number of documents to return. Raises as :meth:`embed`.
        """
        return self._texts.rank(query, documents, top)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels of :meth:`classify`; none for another model."""
        return self._texts.labels

    @property
    def prompts(self) -> Prompts:
        """Prompts of :meth:`embed`, which the model's folder may name."""
        return self._texts.prompts
