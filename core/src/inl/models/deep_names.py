"""Converts older complexity-deep checkpoint layouts to the current one.

Handles names with and without the prefix ``model.``, numbered and named controllers,
separate gate and up tensors, and separate tensors per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Make, Piece
from inl.dtypes import HostArray
from inl.errors import CheckpointError, WeightMismatch

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.models.deep_config import RoutedConfig

RENAMED = {
    ".dynamics.controller.0.": ".dynamics.controller_in.",
    ".dynamics.controller.2.": ".dynamics.controller_out.",
    ".mlp.gate_proj_w": ".mlp.gate_proj",
    ".mlp.up_proj_w": ".mlp.up_proj",
    ".mlp.down_proj_w": ".mlp.down_proj",
}
EOS = (0,)
"""End-of-text token if the config has none."""

Pieces = dict[str, Piece]
Shapes = dict[str, tuple[int, ...]]


def adapt_deep(c: Any, checkpoint: Checkpoint) -> tuple[Any, Checkpoint]:
    """Adapt a checkpoint with INL dynamics to the current tensor names.

    Returns the config with the features that the checkpoint has, and the checkpoint.
    Raises :class:`~inl.errors.WeightMismatch` for expert tensors that do not match.
    """
    pieces = _pieces(c, checkpoint)
    first = "model.layers.0.self_attn.mu_to_"
    adapted = replace(
        c,
        mu_attention=any(".self_attn.mu_to_" in name for name in pieces),
        mu_router=any(name.endswith(".mlp.mu_router.weight") for name in pieces),
        mu_context=any(name.endswith(".dynamics.mu_proj.weight") for name in pieces),
        expert_table=any(name.endswith(".mlp.token_to_expert") for name in pieces),
    )
    # Checkpoints store these, but no layer uses them: no mu precedes the first layer.
    used = {key: piece for key, piece in pieces.items() if not key.startswith(first)}
    return adapted, AdaptedCheckpoint(checkpoint, used, eos=EOS)


def adapt_guided(c: Any, checkpoint: Checkpoint) -> tuple[Any, Checkpoint]:
    """Adapt a mu-guided checkpoint; see :func:`adapt_deep`."""
    pieces = _pieces(c, checkpoint)
    adapted = replace(
        c,
        mu_attention=any(".self_attn.mu_to_" in name for name in pieces),
        mu_router=any(name.endswith(".mlp.mu_router.weight") for name in pieces),
        expert_table=any(name.endswith(".mlp.token_to_expert") for name in pieces),
    )
    return adapted, AdaptedCheckpoint(checkpoint, pieces, eos=EOS)


def _pieces(c: RoutedConfig, checkpoint: Checkpoint) -> Pieces:
    pieces: Pieces = {}
    for stored in checkpoint.names():
        name = canonical(stored)
        if name in pieces:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {stored!r}: is also stored as "
                f"{pieces[name].sources[0]!r}; accepted: each tensor once"
            )
        pieces[name] = Piece((stored,), checkpoint.spec(stored)[1])
    problems: list[str] = []
    for index in range(c.layers):
        _join_experts(c, f"model.layers.{index}.mlp.", pieces, problems)
        table = f"model.layers.{index}.mlp.token_to_expert"
        if table in pieces:
            make = partial(_checked, where=f"{checkpoint.path}: {table}", c=c)
            pieces[table] = pieces[table]._replace(make=make)
    if problems:
        lines = "\n  ".join(problems[:20])
        raise WeightMismatch(
            f"{checkpoint.path}: tensors do not fit the config\n  {lines}"
        )
    return pieces


def canonical(name: str) -> str:
    """Return the current name of a stored tensor."""
    name = name.removeprefix("model.")
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name if name.startswith("lm_head.") else f"model.{name}"


def _join_experts(
    c: RoutedConfig, at: str, pieces: Pieces, problems: list[str]
) -> None:
    """Replace separate gate, up or per-expert tensors by joined ones."""
    h, inner, experts = c.hidden_size, c.expert_size, range(c.experts)
    gate_up, down = f"{at}gate_up_proj", f"{at}down_proj"
    wide, whole = (c.experts, h, 2 * inner), (c.experts, h, inner)
    if any(name.startswith(f"{at}experts.") for name in pieces):
        parts: Shapes = {}
        for part in ("gate", "up"):
            names = [f"{at}experts.{e}.{part}_proj.weight" for e in experts]
            parts |= dict.fromkeys(names, (inner, h))
        _join(gate_up, parts, wide, _transposed_pairs, pieces, problems)
        names = [f"{at}experts.{e}.down_proj.weight" for e in experts]
        parts = dict.fromkeys(names, (h, inner))
        shape = (c.experts, inner, h)
        _join(down, parts, shape, _transposed, pieces, problems)
    elif f"{at}gate_proj" in pieces or f"{at}up_proj" in pieces:
        parts = dict.fromkeys([f"{at}gate_proj", f"{at}up_proj"], whole)
        _join(gate_up, parts, wide, _side_by_side, pieces, problems)


def _join(
    name: str,
    parts: Shapes,
    shape: tuple[int, ...],
    make: Make,
    pieces: Pieces,
    problems: list[str],
) -> None:
    before = len(problems)
    for part, expected in parts.items():
        if part not in pieces:
            problems.append(f"missing {part} {list(expected)}")
        elif pieces[part].shape != expected:
            found = list(pieces[part].shape)
            problems.append(f"{part} has shape {found}, expected {list(expected)}")
    if name in pieces:
        problems.append(f"{name} is stored both whole and in parts")
    if len(problems) == before:
        sources = tuple(pieces.pop(part).sources[0] for part in parts)
        pieces[name] = Piece(sources, shape, make)


def _data(array: HostArray) -> Any:
    return array.data.reshape(array.shape)


def _host(data: Any, like: HostArray) -> HostArray:
    data = np.ascontiguousarray(data)
    data.setflags(write=False)
    return HostArray(data, like.dtype, data.shape)


def _side_by_side(stored: Sequence[HostArray]) -> HostArray:
    """Concatenate two [E, H, I] to [E, H, 2 * I]."""
    return _host(np.concatenate([_data(part) for part in stored], axis=-1), stored[0])


def _transposed(stored: Sequence[HostArray]) -> HostArray:
    """Stack and transpose the matrices [N, K] of all experts to [E, K, N]."""
    return _host(np.stack([_data(part).T for part in stored]), stored[0])


def _transposed_pairs(stored: Sequence[HostArray]) -> HostArray:
    """Join gate, then up matrices of all experts to [E, H, 2 * I]."""
    half = len(stored) // 2
    return _side_by_side([_transposed(stored[:half]), _transposed(stored[half:])])


def _checked(stored: Sequence[HostArray], *, where: str, c: RoutedConfig) -> HostArray:
    """Check that a table of experts has valid indices."""
    (table,) = stored
    values = _data(table)
    if values.dtype.kind not in "iu" or not values.size:
        raise CheckpointError(f"{where}: found {table.dtype}, accepted: integers")
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= c.experts:
        raise CheckpointError(
            f"{where}: found expert {least if least < 0 else most}, accepted: 0 to "
            f"{c.experts - 1}"
        )
    return table
