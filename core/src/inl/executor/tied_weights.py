"""Checkpoints that store the embedding a second time, as the projection to logits."""

from __future__ import annotations

import numpy as np

from inl.checkpoints.checkpoint import Checkpoint
from inl.models.groups import HEAD, TABLE
from inl.spec.op import Spec
from inl.weights.load import stored_specs


def without_copies(checkpoint: Checkpoint, *, tied: bool) -> dict[str, Spec]:
    """Return the specs of the tensors by name, without a copy of the embedding.

    A tied model that has no other projection shares the embedding, once in memory.
    Reads both tensors if the model is tied and the files have both.
    """
    stored = stored_specs(checkpoint)
    if tied and HEAD in stored and stored[HEAD] == stored.get(TABLE):
        head, table = checkpoint.tensor(HEAD), checkpoint.tensor(TABLE)
        if np.array_equal(head.data, table.data):
            del stored[HEAD]
    return stored
