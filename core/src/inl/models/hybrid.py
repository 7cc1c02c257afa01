"""Decoders that have attention in some layers and recurrent state in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.spec.cache import Paged


def recurrent_layers(
    types: Any, layers: int, kinds: Mapping[str, bool], field: str = "layer_types"
) -> tuple[bool, ...]:
    """Return whether each layer is recurrent.

    types: value of ``field``, a kind for each layer. kinds: accepted kinds, and whether
    such a layer is recurrent. Raises :class:`~inl.errors.CheckpointError` for another
    value, and for a model without attention.
    """
    known = isinstance(types, (list, tuple)) and len(types) == layers
    if not known or any(kind not in list(kinds) for kind in types):
        raise CheckpointError(
            f"config field {field!r}: found {show(types)}, expected a list of "
            f"{layers}, {' or '.join(kinds)} for each layer"
        )
    found = tuple(kinds[kind] for kind in types)
    if all(found):
        raise CheckpointError(
            f"config field {field!r}: found no full_attention, accepted: 1 or more"
        )
    return found


def listed_kinds(
    listed: Any, layers: int, kinds: Mapping[str, bool], field: str
) -> list[str]:
    """Return the kind of each layer, from the numbers of those with attention.

    listed: value of ``field``. kinds: the recurrent one, then that with attention.
    Raises :class:`~inl.errors.CheckpointError` for what is no list of numbers.
    """
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise CheckpointError(
            f"config field {field!r}: found {show(listed)}, expected a list of layer "
            "numbers"
        )
    return [list(kinds)[index in listed] for index in range(layers)]


def attention_state(c: Any) -> Paged:
    """Return the cache group of the layers with attention.

    c: a config with ``recurrent``, whether each layer is.
    """
    attending = tuple(index for index, recurs in enumerate(c.recurrent) if not recurs)
    return Paged(attending, c.kv_heads, c.head_dim, c.dtype)


def cache_index(c: Any, index: int) -> int:
    """Return the position of a layer with attention among those that have a cache."""
    before: tuple[bool, ...] = c.recurrent[:index]
    return before.count(False)


def recurrent_indices(c: Any) -> tuple[int, ...]:
    """Return the layers of a config that are recurrent."""
    return tuple(index for index, recurs in enumerate(c.recurrent) if recurs)
