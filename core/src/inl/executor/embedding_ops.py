"""Ops of a step whose tokens have embeddings, positions along axes, or spans."""

from __future__ import annotations

from typing import Any

from inl.ops.rope import RopeScaling
from inl.spec.embedded_rows import EmbeddedRows
from inl.spec.model import ModelInputs
from inl.spec.step import Array, Step


class EmbeddingOps:
    """Replaces the ops that the inputs of tokens change; passes all others on."""

    def __init__(
        self, ops: Any, embedded: EmbeddedRows, step: Step, inputs: ModelInputs
    ) -> None:
        self._ops, self._embedded, self._step = ops, embedded, step
        self._inputs = inputs
        self._is_embedded = False
        if embedded.spans is not None:
            self.attend, self.attention = self._attend, self._attention
            self.attend_project = self._attend_project

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def embedding(self, tokens: Array, w: Any) -> Array:
        """Compute :data:`inl.ops.embedding.embedding`, and replace the first's rows."""
        looked_up, kept = self._ops.embedding(tokens, w), self._embedded.kept
        if not self._is_embedded:
            self._is_embedded = True
            return looked_up * kept + self._embedded.rows
        # A table of other inputs of the tokens.
        if (given := self._inputs.embedded_id) is None:
            return looked_up
        other = self._ops.zeros_like(tokens)
        if given:
            other = other + given
        return looked_up * kept + self._ops.embedding(other, w) * (kept * -1.0 + 1.0)

    def rope_table(
        self, positions: Array, *, dim: int, theta: float, scaling: RopeScaling
    ) -> Any:
        """Compute :data:`inl.ops.rope.axis_rope_table` where the model has axes."""
        offsets = self._embedded.offsets
        turned, table = positions, self._ops.rope_table
        if offsets is not None and scaling.axes:
            turned, table = positions + offsets, self._ops.axis_rope_table
        return table(turned, dim=dim, theta=theta, scaling=scaling)

    def _attention(self, q: Array, cache: Any, step: Step, **attrs: Any) -> Array:
        """Compute :data:`inl.ops.span_attention.span_attention`."""
        if self._inputs.windowed_spans and attrs["window"] is None:
            return self._ops.attention(q, cache, step, **attrs)
        spans = self._embedded.spans
        if q.shape[0] != self._step.tokens.shape[0]:  # the sampled tokens only
            spans = self._ops.take_rows(spans, self._step.samples)
        return self._ops.span_attention(q, cache, step, spans, **attrs)

    def _attend(
        self, q: Array, k: Array, v: Array, cache: Any, step: Step, *, scale: float,
        window: int | None = None, cap: float | None = None, group: int = 0,
    ) -> Any:  # fmt: skip
        cache = self._ops.write_kv(k, v, cache, step.writes[group])
        out = self._attention(
            q, cache, step, scale=scale, window=window, cap=cap, group=group
        )
        return out, cache

    def _attend_project(
        self, q: Array, k: Array, v: Array, cos: Array, sin: Array, cache: Any,
        step: Step, w: Any, **attrs: Any,
    ) -> Any:  # fmt: skip
        q, k = self._ops.rope(q, k, cos, sin)
        out, cache = self._attend(q, k, v, cache, step, **attrs)
        return self._ops.linear(out.reshape(out.shape[0], -1), w), cache
