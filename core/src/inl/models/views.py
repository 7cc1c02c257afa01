"""What each layer's attention sees, and so which layers share a cache group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inl.errors import CheckpointError
from inl.models.config import whole
from inl.spec.cache import Paged


class View(NamedTuple):
    """What one layer's attention sees."""

    window: int | None = None
    """Tokens, the query's own among them; ``None`` is everything before it."""
    group: int = 0
    """Cache group of the layer."""


FULL = View()
"""The view of every layer of a model without windows."""

LAYER_KINDS = {"full_attention": False, "sliding_attention": True}
"""Accepted entries of ``layer_types``: whether the layer sees a window only."""


def windows(hf: Mapping[str, Any], kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Window of each layer, ``None`` where it sees everything.

    ``kinds``, one for each layer, is used where the config has no ``layer_types``.
    """
    found = hf.get("layer_types") or list(kinds)
    if not isinstance(found, (list, tuple)) or len(found) != len(kinds):
        raise CheckpointError(
            f"config field 'layer_types': found {found!r:.80}, "
            f"expected a list of {len(kinds)}, one for each layer"
        )
    for index, kind in enumerate(found):
        if not isinstance(kind, str) or kind not in LAYER_KINDS:
            raise CheckpointError(
                f"config field 'layer_types[{index}]': found {kind!r:.80}, "
                f"accepted: {', '.join(LAYER_KINDS)}"
            )
    if not any(LAYER_KINDS[kind] for kind in found):
        return (None,) * len(kinds)
    size = whole(hf, "sliding_window")
    return tuple(size if LAYER_KINDS[kind] else None for kind in found)


def one_window(
    hf: Mapping[str, Any], layers: int, max_tokens: int
) -> tuple[int | None, ...]:
    """Window of all layers alike, where the config has one.

    One that is as long as the longest text hides nothing, and is ``None``.
    """
    size = whole(hf, "sliding_window") if hf.get("sliding_window") is not None else None
    return (size if size is not None and size < max_tokens else None,) * layers


def views(windows: Sequence[int | None]) -> tuple[View, ...]:
    """One view a layer: layers with the same window share a cache group."""
    kinds = list(dict.fromkeys(windows))
    return tuple(View(window, kinds.index(window)) for window in windows)


def paged(c: Any) -> tuple[Paged, ...]:
    """Cache groups of a config with ``views``, in order."""
    layers: dict[View, list[int]] = {}
    for index, view in enumerate(c.views):
        layers.setdefault(view, []).append(index)
    return tuple(
        Paged(tuple(layers[view]), c.kv_heads, c.head_dim, c.dtype, view.window)
        for view in sorted(layers, key=lambda view: view.group)
    )
