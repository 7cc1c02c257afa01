"""AFM (Arcee AI, 2025): Llama with feed-forward layers of squared ReLU, no gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama, mlp
from inl.models.fields import with_defaults

DEFAULTS: Final = {
    "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    return llama.config(with_defaults(hf, DEFAULTS))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    tree = llama.weights(c)
    layers = tuple(
        layer._replace(mlp=layer.mlp._replace(mlp=_feed_forward(c, index)))
        for index, layer in enumerate(tree.layers)
    )
    return tree._replace(layers=layers)


def _feed_forward(c: llama.LlamaConfig, index: int) -> mlp.OpenMlp:
    stem = f"model.layers.{index}.mlp"
    return mlp.OpenMlp(
        mlp.open_linear(c, f"{stem}.up_proj", c.mlp_bias),
        mlp.open_linear(c, f"{stem}.down_proj", c.mlp_bias, down=True),
    )


MODEL = replace(llama.MODEL, config=config, weights=weights)
