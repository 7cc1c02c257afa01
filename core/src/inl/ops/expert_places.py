"""Places of experts of which some have copies: ids of experts to those of places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inl.spec.op import Case, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class ExpertPlaces(NamedTuple):
    """Parameters of :data:`place_experts`."""

    table: Array
    """int32 [E, 2 * E - 1]: place of an expert, by the sum of the ids of the best and
    the last expert that the token chose."""


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, experts, k in ((1, 4, 2), (17, 8, 3)):
        table = rng.integers(0, 99, (experts, 2 * experts - 1)).astype(np.int32)
        ids = np.argsort(rng.random((tokens, experts)), -1)[:, :k].astype(np.int32)
        yield Case(f"{tokens}x{experts}x{k}", (ids, ExpertPlaces(table)))


@op(
    cases=_cases, weights=ExpertPlaces, rounds=False, since=(2, 1),
    used_by="copies of experts",
)  # fmt: skip
def place_experts(ops: Ops, ids: Array, w: ExpertPlaces) -> Array:
    """Return the place of each chosen expert: int32 [T, k].

    ids: int32 [T, k], each 0 to E - 1. A token that chose an expert with copies goes to
    one of them by its own choice of experts, hence to the same one in every batch.
    """
    sums = ids[:, :1] + ids[:, ids.shape[1] - 1 :]
    index = ids * w.table.shape[1] + sums
    places = ops.take_rows(w.table.reshape(-1, 1), index.reshape(-1))
    placed: Array = places.reshape(ids.shape[0], ids.shape[1])
    return placed
