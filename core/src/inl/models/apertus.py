"""Apertus (Swiss AI Initiative, 2025): norms of each head, xIELU without a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray, widen, wrap
from inl.models import llama, mlp
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed
from inl.spec.weights import Group, Param

XIELU: Final = "xielu"
DEFAULTS: Final = {
    "max_position_embeddings": 65536, "hidden_act": XIELU, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
THETA: Final = 12e6
"""Default base frequency of the rotation."""
ROTATION: Final = {
    "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""The rotation of a config that names none."""
RENAMES: Final = {
    r"\.attention_layernorm\.": ".input_layernorm.",
    r"\.feedforward_layernorm\.": ".post_attention_layernorm.",
    r"^.*\.act_fn\.(beta|eps)$": "",
}
"""Parts of tensor names, as patterns, and what they are in this file."""
SLOPE: Final = 0.5
"""Factor on all values, of a checkpoint without ``beta``."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    has_xielu = hf.get("hidden_act") == XIELU
    hf = changed(hf, mlp_bias=False)
    if has_xielu:
        hf = changed(hf, hidden_act="relu")
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = changed(hf, rope_parameters=ROTATION)
    base = replace(llama.config(hf, theta=THETA), head_norm=True)
    return replace(base, activation=XIELU) if has_xielu else base


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def open_layer(at: str, plain: llama.Layer) -> llama.Layer:
        stem = f"{at}mlp"
        inner = mlp.ungated(c, f"{stem}.up_proj", f"{stem}.down_proj")
        if c.activation == XIELU:
            names = "positive", "negative", "slope"
            params = {name: Param(f"{stem}.act_fn.{name}", (1,)) for name in names}
            inner = inner._replace(xielu=Group("xielu", **params))
        return plain._replace(mlp=plain.mlp._replace(mlp=inner))

    return llama.with_layers(llama.weights(c), open_layer)


def adapt(
    c: llama.LlamaConfig, checkpoint: Checkpoint
) -> tuple[llama.LlamaConfig, AdaptedCheckpoint]:
    """Rename tensors; compute the factors of activations from what is stored."""
    known = set(checkpoint.names())

    def split(stored: str, _new: str, _shape: Any) -> Mapping[str, Piece] | None:
        stem, _, name = stored.rpartition(".")
        if not stem.endswith(".act_fn") or name not in ("alpha_p", "alpha_n"):
            return None
        sources = (stored, *(f"{stem}.beta",) * (f"{stem}.beta" in known))
        if name == "alpha_n":
            return {f"{stem}.negative": Piece(sources, (1,), partial(_factor, True))}
        return {
            f"{stem}.positive": Piece((stored,), (1,), partial(_factor, False)),
            f"{stem}.slope": Piece(sources, (1,), _slope),
        }

    return c, renamed(checkpoint, RENAMES, split)


def _factor(adds_slope: bool, stored: Sequence[HostArray]) -> HostArray:
    """Return the softplus of a stored number, plus the slope."""
    factor = np.logaddexp(0, widen(stored[0]).astype(np.float64).reshape(1))
    slope = _slope(stored).data if adds_slope else 0
    return wrap((factor + slope).astype(np.float32))


def _slope(stored: Sequence[HostArray]) -> HostArray:
    """Return the second number; by default that of :data:`SLOPE`."""
    if len(stored) < 2:
        return wrap(np.full(1, SLOPE, np.float32))
    return wrap(widen(stored[1]).astype(np.float32).reshape(1))


MODEL = replace(llama.MODEL, config=config, weights=weights, adapt=adapt)
