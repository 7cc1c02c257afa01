"""Hidden states in place of logits: a model that ends before its last product."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from inl.models.hidden_ops import AllHiddenOps, HiddenOps, hidden_head

if TYPE_CHECKING:
    from inl.executor.loaded import Loaded


def pooled(loaded: Loaded) -> Loaded:
    """Return the model of programs that end before the product of the head.

    Without weights, so that what is compiled from it refers to none.
    """
    kind = AllHiddenOps if loaded.pooling == "mean" else HiddenOps
    head = partial(hidden_head, loaded.model.head, kind=kind)
    model = replace(loaded.model, head=head, vocab_size=None)
    return replace(
        loaded, model=model, weights=None, adapters=None, taps=(),
        ends_before_head=True,
    )  # fmt: skip
