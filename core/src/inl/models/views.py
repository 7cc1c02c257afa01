"""Attention windows of layers, and the cache groups that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models.config import whole
from inl.spec.cache import Paged


class View(NamedTuple):
    """Attention window and cache group of one layer."""

    window: int | None = None
    """Tokens that a query attends to, its own included; ``None`` is all."""
    group: int = 0
    """Cache group of the layer."""
    rotated: bool = True
    """Whether queries and keys are rotated by their positions."""


FULL = View()
"""View of every layer of a model without windows."""

LAYER_KINDS = {"full_attention": False, "sliding_attention": True}
"""Accepted entries of ``layer_types``, and whether the layer has a window."""


def windows(hf: Mapping[str, Any], kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Return the window of each layer, ``None`` for full attention.

    kinds: default of the config's ``layer_types``, one per layer.
    """
    types = hf.get("layer_types") or list(kinds)
    if not isinstance(types, (list, tuple)) or len(types) != len(kinds):
        raise CheckpointError(
            f"config field 'layer_types': found {types!r:.80}, "
            f"expected a list of {len(kinds)}, one for each layer"
        )
    for index, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in LAYER_KINDS:
            raise CheckpointError(
                f"config field 'layer_types[{index}]': found {kind!r:.80}, "
                f"accepted: {', '.join(LAYER_KINDS)}"
            )
    if not any(LAYER_KINDS[kind] for kind in types):
        return (None,) * len(kinds)
    size = whole(hf, "sliding_window")
    return tuple(size if LAYER_KINDS[kind] else None for kind in types)


def refuse_windows(hf: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` if ``layer_types`` has layers with a window."""
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise CheckpointError(
            f"config field 'layer_types': found {show(hf['layer_types'])}, accepted: "
            "full_attention for every layer"
        )


def alternating(layers: int) -> list[str]:
    """Return layer types of which every second has no window, the first has one."""
    return one_full_in(layers, period=2)


def one_full_in(layers: int, *, period: int) -> list[str]:
    """Return layer types; the last layer of each ``period`` has no window."""
    names = "sliding_attention", "full_attention"
    return [names[(index + 1) % period == 0] for index in range(layers)]


def one_window(
    hf: Mapping[str, Any], layers: int, max_tokens: int
) -> tuple[int | None, ...]:
    """Return the config's ``sliding_window`` for all layers.

    A window of at least ``max_tokens`` has no effect and becomes ``None``.
    """
    size = whole(hf, "sliding_window") if hf.get("sliding_window") is not None else None
    return (size if size is not None and size < max_tokens else None,) * layers


def views(
    windows: Sequence[int | None], rotated: Sequence[bool] = ()
) -> tuple[View, ...]:
    """Return one view per layer; layers with the same window share a cache group.

    rotated: whether each layer rotates queries and keys; all do by default.
    """
    kinds = list(dict.fromkeys(windows))
    turned = rotated or (True,) * len(windows)
    return tuple(
        View(window, kinds.index(window), turns)
        for window, turns in zip(windows, turned, strict=True)
    )


def paged(c: Any) -> tuple[Paged, ...]:
    """Return the cache groups of a config with ``views``, in order."""
    windows = {view.group: view.window for view in c.views}
    return tuple(
        Paged(
            tuple(i for i, view in enumerate(c.views) if view.group == group),
            c.kv_heads,
            c.head_dim,
            c.dtype,
            window,
        )
        for group, window in sorted(windows.items())
    )
