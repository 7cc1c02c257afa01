"""Embeddings, classes and ranks of texts, by an encoder or a model that generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.checkpoints.sentence_transformers import DenseModule, Prompts, read_prompts
from inl.engine.embedder import unit_length
from inl.errors import CheckpointError, RequestError
from inl.spec.encoder import Labels, TokenSequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.engine.options import Prompt
    from inl.engine.prompt_encoder import PromptEncoder
    from inl.executor.model_loader import LanguageModel

Compute = Callable[[Sequence[TokenSequence]], Sequence["NDArray[np.float32]"]]
"""(sequences) -> a row for each."""


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """The class of a text."""

    index: int
    """Index of the label with the highest score."""
    label: str
    """Its name."""
    scores: NDArray[np.float32]
    """[labels] scores of all, in the order of :attr:`TextScores.labels`."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and its score for a query."""

    index: int
    """Index among the given documents."""
    score: float


class TextScores:
    """What a model computes of whole texts.

    prompts: encodes them. compute: returns a row for each sequence: embeddings, or the
    logits of labels. context: maximum number of tokens.
    """

    def __init__(
        self, model: LanguageModel, prompts: PromptEncoder, compute: Compute, *,
        context: int,
    ) -> None:  # fmt: skip
        self._model, self._encoder, self._compute = model, prompts, compute
        self._context = context
        encoder = model.encoder is not None
        self._labels: Labels = model.config.labels if encoder else Labels()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels; none for a model that embeds."""
        return self._labels.names

    @cached_property
    def prompts(self) -> Prompts:
        """The prompts of sentence-transformers, which the model's folder may name."""
        return read_prompts(self._model.checkpoint.path)

    def embed(
        self, texts: Sequence[Prompt], *, dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Return embeddings, float32 [n, H], see :meth:`InferenceEngine.embed`."""
        if self.labels:
            raise RequestError(
                f"{self._model.name}: classifies; use classify(), score() or rank()"
            )
        dense = self._dense
        width = len(dense[-1].weight) if dense else self._model.config.hidden_size
        if dimensions is not None and not 0 < dimensions <= width:
            raise RequestError(f"dimensions: found {dimensions}, accepts 1 to {width}")
        prefix = self.prompts.text(prompt_name)
        given = [prefix + text if isinstance(text, str) else text for text in texts]
        rows = self._compute([TokenSequence(self._ids(each)) for each in given])
        if not rows:
            return np.empty((0, dimensions or width), np.float32)
        if dense:
            rows = self._after(dense, rows)
        if dimensions is not None and dimensions < width:
            short = (row[:dimensions] for row in rows)
            rows = [unit_length(f"prompts[{at}]", row) for at, row in enumerate(short)]
        return np.stack(rows)

    def classify(
        self, texts: Sequence[Prompt], seconds: Sequence[str] | None = None
    ) -> list[Classification]:
        """Return the class of each text, or of each pair of texts."""
        if not self.labels:
            raise RequestError(
                f"{self._model.name}: has no head that classifies; use embed()"
            )
        found = []
        for row in self._scores(self._sequences(texts, seconds)):
            index = int(row.argmax())
            found.append(Classification(index, self.labels[index], row))
        return found

    def score(
        self, firsts: Sequence[str], seconds: Sequence[str]
    ) -> NDArray[np.float32]:
        """Return the score of each pair, float32 [n].

        Of a cross-encoder, which has one label, its score; of a model that embeds,
        the cosine of both. Raises :class:`~inl.errors.RequestError`.
        """
        if len(self.labels) > 1:
            raise RequestError(
                f"{self._model.name}: has {len(self.labels)} labels, a score needs one "
                "or a model that embeds"
            )
        if self.labels:
            rows = self._scores(self._sequences(firsts, seconds))
            return np.array([row[0] for row in rows], np.float32)
        left = self.embed(firsts, prompt_name=self._named("query"))
        right = self.embed(seconds, prompt_name=self._named("document", "passage"))
        cosines = (_units(left) * _units(right)).sum(-1)
        return np.asarray(cosines, np.float32)

    def rank(
        self, query: str, documents: Sequence[str], top: int | None = None
    ) -> list[Ranked]:
        """Return the documents by descending score, the first ``top`` of them."""
        if top is not None and top < 1:
            raise RequestError(f"top: found {top}, accepts 1 or more")
        if not documents:
            return []
        if self.labels:
            scores = self.score([query] * len(documents), documents)
        else:
            left = self.embed([query], prompt_name=self._named("query"))
            name = self._named("document", "passage")
            right = self.embed(documents, prompt_name=name)
            scores = (_units(left) @ _units(right).T)[0]
        order = np.argsort(-scores, kind="stable")[:top]
        return [Ranked(int(index), float(scores[index])) for index in order]

    def _named(self, *names: str) -> str | None:
        """Return the first of the names that the model has a prompt of."""
        return next((name for name in names if name in self.prompts.texts), None)

    def _sequences(
        self, texts: Sequence[Prompt], seconds: Sequence[str] | None
    ) -> list[TokenSequence]:
        if seconds is None:
            return [TokenSequence(self._ids(text)) for text in texts]
        if len(texts) != len(seconds):
            raise RequestError(
                f"pairs: found {len(texts)} first and {len(seconds)} second texts, "
                "accepts as many of both"
            )
        tokenizer, found = self._encoder.tokenizer("pairs"), []
        for first, second in zip(texts, seconds, strict=True):
            if not (isinstance(first, str) and isinstance(second, str)):
                raise RequestError("pairs: found token ids, accepts texts")
            ids, kinds = tokenizer.encode_pair(first, second)
            most = max(self._model.config.kinds, 1) - 1
            found.append(TokenSequence(ids, [min(kind, most) for kind in kinds]))
        return found

    def _scores(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        activate = ACTIVATIONS[self._labels.activation]
        wide = (row.astype(np.float64) for row in self._compute(sequences))
        return [np.asarray(activate(row), np.float32) for row in wide]

    def _ids(self, prompt: Prompt) -> list[int]:
        return self._encoder.encode(prompt, self._context)

    @cached_property
    def _dense(self) -> tuple[DenseModule, ...]:
        """The products after the pooling; raises CheckpointError."""
        return self._model.modules.read_dense()

    def _after(
        self, dense: Sequence[DenseModule], rows: Sequence[NDArray[np.float32]]
    ) -> list[NDArray[np.float32]]:
        """Return the rows after the products, of length 1 if the files say so."""
        found = np.stack(rows)
        for each in dense:
            if found.shape[1] != each.weight.shape[1]:
                raise CheckpointError(
                    f"{self._model.name}: found a dense module of "
                    f"{each.weight.shape[1]} inputs after {found.shape[1]}"
                )
            found = each.apply(found)
        if not self._model.modules.unit:
            return list(found)
        return [unit_length(f"prompts[{at}]", row) for at, row in enumerate(found)]


def _softmax(logits: Any) -> Any:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _sigmoid(logits: Any) -> Any:
    return np.where(logits < 0, np.exp(logits), 1) / (1 + np.exp(-np.abs(logits)))


ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "softmax": _softmax, "sigmoid": _sigmoid, "identity": lambda logits: logits,
}  # fmt: skip


def _units(rows: Any) -> Any:
    wide = rows.astype(np.float64)
    return wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
