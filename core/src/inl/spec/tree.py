"""Tree functions for the nested tuples and mappings of arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to every leaf; ``None`` is not a leaf and stays ``None``."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: tree_map(function, tree[key]) for key in tree}
    if isinstance(tree, (tuple, list)):
        leaves = [tree_map(function, item) for item in tree]
        return type(tree)(*leaves) if is_named(tree) else type(tree)(leaves)
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Iterate over every leaf that is not ``None``, in order."""
    if isinstance(tree, Mapping):
        for key in tree:
            yield from leaves(tree[key])
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif tree is not None:
        yield tree


def is_named(tree: Any) -> bool:
    """Return whether a tuple is a ``NamedTuple``."""
    return isinstance(tree, tuple) and getattr(tree, "_fields", None) is not None
