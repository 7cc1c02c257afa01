"""Calls of ``inl.Tensor`` beside the same of NumPy's arrays."""

from __future__ import annotations

import numpy as np

from inl import nn

X = np.random.default_rng(7).standard_normal((3, 4, 2))
"""No two elements are equal, and none is near 0, 0.5 or -0.5."""


INDEXES = {
    "integer": 1,
    "negative": -1,
    "numpy integer": np.int64(2),
    "slice": slice(1, None),
    "step": slice(None, None, 2),
    "backwards": slice(None, None, -1),
    "empty": slice(2, 1),
    "ellipsis": (..., 0),
    "new axis": (None, 1, ..., None),
    "all integers": (2, 3, 1),
    "nothing": (),
    "list": [2, 0, 2],
    "empty list": [],
    "array": np.array([[0, 1], [1, 1]]),
    "pairs": (np.array([0, 2]), slice(None), np.array([1, 0])),
    "integer and array": (1, [3, 3, 0]),
    "mask": X[..., 0] > 0,
    "whole mask": X > 0,
    "mask of an axis": (slice(None), np.array([True, False, True, True])),
    "often": [1] * 20,
}


CALLS = {
    "sum": lambda x: x.sum(),
    "sum of axes": lambda x: x.sum((0, -1)),
    "sum keepdims": lambda x: x.sum((1, 2), keepdims=True),
    "sum of none": lambda x: x.sum(()),
    "mean": lambda x: x.mean(),
    "mean of axes": lambda x: x.mean((0, 2), keepdims=True),
    "max": lambda x: x.max(),
    "max of axes": lambda x: x.max((0, 1)),
    "max keepdims": lambda x: x.max(-1, keepdims=True),
    "min": lambda x: x.min(1),
    "var": lambda x: x.var((0, 1)),
    "std": lambda x: x.std(1, keepdims=True),
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: x.flatten(),
    "T": lambda x: x[0].T,
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "copy": lambda x: x.copy(),
    "arithmetic": lambda x: (2 - x) * x / (x**2 + 1) + 1 / (x**2 + 2) - (-x),
    "base": lambda x: 2**x,
    "abs": abs,
    "clip": lambda x: x.clip(-0.5, 0.5),
    "clip from": lambda x: x.clip(0.5),
    "iteration": lambda x: sum(row * index for index, row in enumerate(x)),
    "item": lambda x: x * x.max().item(),
    "astype": lambda x: x * (x > 0).astype("float32"),
}
"""The same expression of a tensor and an array."""


def softmax(x, axis=-1):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


FORMULAS = {
    "sqrt": (lambda x: (x * x).sqrt(), lambda x: np.sqrt(x * x)),
    "exp": (lambda x: x.exp(), np.exp),
    "log": (lambda x: abs(x).log(), lambda x: np.log(abs(x))),
    "tanh": (lambda x: x.tanh(), np.tanh),
    "sigmoid": (lambda x: x.sigmoid(), lambda x: 1 / (1 + np.exp(-x))),
    "relu": (lambda x: x.relu(), lambda x: np.maximum(x, 0)),
    "maximum": (lambda x: x.maximum(x * x), lambda x: np.maximum(x, x * x)),
    "minimum": (lambda x: x.minimum(0.5), lambda x: np.minimum(x, 0.5)),
    "softmax": (lambda x: x.softmax(1), lambda x: softmax(x, 1)),
    "log_softmax": (lambda x: x.log_softmax(), lambda x: np.log(softmax(x))),
    "unbiased": (lambda x: x.var(0, correction=1), lambda x: x.var(0, ddof=1)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), lambda x: x[..., None]),
    "broadcast": (
        lambda x: x[:, :1].broadcast_to(2, -1, 4, -1),
        lambda x: np.broadcast_to(x[:, :1], (2, 3, 4, 2)),
    ),
    "permute": (lambda x: x.permute(2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    "where": (
        lambda x: nn.where(x[0] > 0, x * x, -1),
        lambda x: np.where(x[0] > 0, x * x, -1),
    ),
    "concatenate": (
        lambda x: nn.concatenate([x, x[:, 1:] * 2], 1),
        lambda x: np.concatenate([x, x[:, 1:] * 2], 1),
    ),
    "stack": (
        lambda x: nn.stack([x[0], x[1] ** 2], -1),
        lambda x: np.stack([x[0], x[1] ** 2], -1),
    ),
}
"""An expression of a tensor, and the same of an array."""
