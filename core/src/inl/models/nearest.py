"""The supported family that is nearest to one that is not, and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

SIMILAR: Final = 0.7
"""Least similarity of the names of families, 0 to 1."""


class Difference(NamedTuple):
    """What a family has that the nearest supported one has not."""

    nearest: str
    """The ``model_type`` of that one."""
    lacking: str


INDEXER: Final = "sparse attention by an indexer"
DIFFERENCES: Final = {
    "deepseek_v4": Difference(
        "deepseek_v3", "compressed caches, hyper-connections and an indexer"
    ),
    "qwen4_exp": Difference(
        "qwen3_5_moe", f"gated residuals, n-gram embeddings and {INDEXER}"
    ),
    "phimoe": Difference("mixtral", "routing by thresholds (SparseMixer), layer norms"),
    "jamba": Difference("bamba", "Mamba-1 in place of Mamba-2"),
    "falcon_mamba": Difference("falcon_h1", "Mamba-1 in place of Mamba-2"),
    "mamba2": Difference("bamba", "models without attention"),
    "minimax": Difference("minimax_m2", "lightning attention in most layers"),
    "kimi_linear": Difference("qwen3_next", "a gate per channel in the delta rule"),
    "bloom": Difference("gpt2", "ALiBi in place of positions"),
    "mpt": Difference("gpt_neox", "ALiBi in place of rotation"),
}
"""Families that are asked for and not supported, by ``model_type``."""


def nearest(names: Sequence[str], known: Iterable[str]) -> str:
    """Return a sentence about the supported family nearest to a config's names.

    names: its ``model_type`` and architectures. known: registered names. Empty if no
    family is near.
    """
    registered = sorted(known)
    for name in names:
        found = DIFFERENCES.get(name.removesuffix("_text"))
        if found is not None and found.nearest in registered:
            return f"nearest: {found.nearest}, which lacks {found.lacking}"
    for name in names:
        close = get_close_matches(name, registered, n=1, cutoff=SIMILAR)
        if close:
            return f"nearest by name: {close[0]}"
    return ""
