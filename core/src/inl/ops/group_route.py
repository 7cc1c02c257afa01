"""Routing of DeepSeek-V2 and V3: experts of the best groups, ranked with a bias."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from inl.errors import RequestError
from inl.ops.moe import LEAST, best, softmax
from inl.spec.op import Case, Sizes, Spec, op
from inl.spec.step import Array

KINDS = ("sigmoid", "softmax")
"""Scores of experts: a sigmoid of each logit, or the softmax of all."""


class ExpertBias(NamedTuple):
    """Parameters of :data:`group_route`."""

    bias: Array | None = None
    """[E] float32, added to the scores that rank experts."""


SIZES = ((1, 1, 6, 2, 1), (9, 4, 4, 3, 2))
"""(tokens, groups, experts of each, k, chosen groups) of the cases."""

CLOSE = 1e-5
"""Ranks of a case differ by more."""


def check_groups(experts: int, k: int, groups: int, chosen: int, best_of: int) -> None:
    """Raise :class:`RequestError` for numbers that do not fit."""
    size = experts // groups if groups > 0 else 0
    if groups < 1 or experts % groups or not 0 < chosen <= groups:
        raise RequestError(
            f"group_route: found {chosen} of {groups} groups for {experts} experts, "
            "accepted: at most all of a number of groups that divides the experts"
        )
    if not 0 < k <= chosen * size or not 0 < best_of <= size:
        raise RequestError(
            f"group_route: found {k} experts of {chosen} groups of {size}, ranked by "
            f"their best {best_of}; accepted: at most as many as the groups have"
        )


def _shapes(logits: Spec, _w: Any, *, k: int, kind: str, groups: int, chosen: int,
            best_of: int, renormalize: bool) -> tuple[Spec, Spec]:  # fmt: skip  # noqa: ARG001
    check_groups(logits.shape[-1], k, groups, chosen, best_of)
    if kind not in KINDS:
        raise RequestError(
            f"group_route: kind: found {kind!r}, accepted: {', '.join(KINDS)}"
        )
    shape = logits.shape[0], k
    return Spec(shape, "int32"), Spec(shape, "float32")


def _distinct(
    rng: np.random.Generator, tokens: int, groups: int, size: int
) -> tuple[Array, Array]:
    """Draw logits and a bias that bfloat16 holds exactly, without close ranks.

    All ranks and sums of ranks differ by more than the error of a sigmoid.
    """
    experts = groups * size
    spread = np.round(32 * np.linspace(-2, 2, experts)) / 32
    while True:
        logits = rng.permuted(np.tile(spread, (tokens, 1)), axis=1)
        bias = np.round(32 * rng.standard_normal(experts).clip(-2, 2)) / 32
        scores = (1 / (1 + np.exp(-logits)), softmax(logits))
        ranks = np.stack([part + each for part in scores for each in (0, bias)])
        sums = np.sort(ranks.reshape(4, tokens, groups, size))[..., -2:].sum(-1)
        if all(np.diff(np.sort(each)).min(initial=1) > CLOSE for each in (ranks, sums)):
            return logits, bias.astype(np.float32)


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, groups, size, k, chosen in sizes:
        logits, bias = _distinct(rng, tokens, groups, size)
        for kind, best_of in (("sigmoid", 2), ("softmax", 1)):
            for renormalize in (False, True):
                attrs = {
                    "k": k, "kind": kind, "groups": groups, "chosen": chosen,
                    "best_of": best_of, "renormalize": renormalize,
                }  # fmt: skip
                name = f"{tokens}x{groups}x{size}/{kind}/{renormalize}"
                yield Case(name, (logits, ExpertBias()), attrs)
                yield Case(f"{name}/bias", (logits, ExpertBias(bias)), attrs)


@op(shapes=_shapes, cases=_cases, weights=ExpertBias, rounds=False, since=(1, 2))
def group_route(
    logits: Array,
    w: ExpertBias,
    *,
    k: int,
    kind: str,
    groups: int,
    chosen: int,
    best_of: int,
    renormalize: bool,
) -> tuple[Array, Array]:
    """Choose the top ``k`` experts of each token among those of the best groups.

    logits: [T, E]. Experts are in ``groups`` groups of equal size. Their scores are the
    sigmoid or the softmax of the logits, as ``kind`` says; ranks are scores plus
    ``w.bias``. A group ranks by the sum of its ``best_of`` highest ranks; experts
    outside of the ``chosen`` best groups are left out. Returns ids int32 [T, k], best
    first, ties to the lowest, and weights float32 [T, k]: the scores, scaled to sum to
    1 if ``renormalize``. Raises :class:`~inl.errors.RequestError` for numbers that do
    not fit.
    """
    tokens, experts = logits.shape
    check_groups(experts, k, groups, chosen, best_of)
    scores = softmax(logits) if kind == "softmax" else 0.5 + 0.5 * np.tanh(0.5 * logits)
    ranks = scores if w.bias is None else scores + w.bias
    members = ranks.reshape(tokens, groups, -1)
    totals = np.sort(members, axis=-1)[:, :, -best_of:].sum(-1)
    kept = np.zeros((tokens, groups), bool)
    np.put_along_axis(kept, best(totals, chosen), True, axis=-1)
    ids = best(np.where(np.repeat(kept, experts // groups, 1), ranks, -np.inf), k)
    weights = np.take_along_axis(scores, ids, -1)
    if renormalize:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), LEAST)
    return ids.astype(np.int32), weights.astype(logits.dtype)
