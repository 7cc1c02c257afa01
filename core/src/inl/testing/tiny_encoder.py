"""A tiny BERT with random weights in memory, and its float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]


def tiny_bert(
    rng: np.random.Generator, labels: int = 0
) -> tuple[dict[str, Any], Tensors]:
    """Return a BERT config in the Hugging Face layout, and its tensors by name.

    labels: of a head that classifies; 0 has none.
    """
    config = {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
        "model_type": "bert", "vocab_size": 96, "hidden_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80,
        "max_position_embeddings": 40, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-6, "num_labels": labels or 2,
    }  # fmt: skip
    h, inner = 48, 80
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (96, h),
        "embeddings.position_embeddings.weight": (40, h),
        "embeddings.token_type_embeddings.weight": (2, h),
        "embeddings.LayerNorm.weight": (h,), "embeddings.LayerNorm.bias": (h,),
    }  # fmt: skip
    sizes = {
        "attention.self.query": (h, h), "attention.self.key": (h, h),
        "attention.self.value": (h, h), "attention.output.dense": (h, h),
        "intermediate.dense": (inner, h), "output.dense": (h, inner),
        "attention.output.LayerNorm": (h,), "output.LayerNorm": (h,),
    }  # fmt: skip
    for index in range(2):
        for name, shape in sizes.items():
            shapes[f"encoder.layer.{index}.{name}.weight"] = shape
            shapes[f"encoder.layer.{index}.{name}.bias"] = shape[:1]
    for name, rows in (("pooler.dense", h), ("classifier", labels)):
        if labels:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, h), (rows,)
    tensors = {name: _random(rng, name, shape) for name, shape in shapes.items()}
    return config, tensors


def _random(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    values = rng.standard_normal(shape)
    if len(shape) > 1 and "embeddings" not in name:
        values *= 2 / shape[1] ** 0.5
    elif name.endswith("LayerNorm.weight"):
        values = 1 + 0.3 * values
    elif name.endswith("bias"):
        values *= 0.5
    return np.asarray(values, np.float32)


def plain_encoding(
    config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]],
    ids: Sequence[int], kind: str, *, unit: bool,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the result [K] of one sequence in float64, by the formulas of BERT.

    kind: "mean", "first" or "last". unit: whether its length is 1. An oracle:
    independent of the ops and models of this package.
    """
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]

    def norm(x: Any, name: str) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
        return centered / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(
        x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm"
    )
    for index in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{index}."
        q, k, v = (
            linear(x, f"{at}attention.self.{name}")
            .reshape(len(ids), heads, -1)
            .swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5)
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        mixed = mixed.swapaxes(0, 1).reshape(len(ids), -1)
        out = linear(mixed, f"{at}attention.output.dense")
        x = norm(x + out, f"{at}attention.output.LayerNorm")
        inner = linear(x, f"{at}intermediate.dense")
        inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        x = norm(x + linear(inner, f"{at}output.dense"), f"{at}output.LayerNorm")
    if "classifier.weight" in w:
        return np.asarray(linear(np.tanh(linear(x[0], "pooler.dense")), "classifier"))
    row = x.mean(0) if kind == "mean" else x[0 if kind == "first" else -1]
    return np.asarray(row / np.sqrt((row**2).sum()) if unit else row)
