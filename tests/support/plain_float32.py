"""A NumPy backend that adds in float32, one value after the other.

It is correct, and less accurate than BLAS and NumPy, which add in blocks: a check that
it fails is too strict.
"""

from __future__ import annotations

import numpy as np

from inl.backend.base import Traits
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl.spec.tolerance import round_results
from inl.spec.tree import tree_map


class Plain(np.ndarray):
    """An array whose products and sums are computed in order, in its own dtype."""

    def __matmul__(self, other):
        a, b = np.asarray(self), np.asarray(other)
        total = a[..., :1] * b[..., :1, :]
        for k in range(1, a.shape[-1]):
            total = total + a[..., k : k + 1] * b[..., k : k + 1, :]
        return total.view(Plain)

    def __rmatmul__(self, other):
        return np.asarray(other).view(Plain) @ self

    def sum(self, axis=None, keepdims=False, **_):
        if self.dtype.kind != "f" or axis is None:
            return np.asarray(self).sum(axis, keepdims=keepdims)
        total = np.add.accumulate(np.asarray(self), axis=axis)
        last = np.take(total, [-1], axis=axis)
        return (last if keepdims else np.squeeze(last, axis)).view(Plain)

    def mean(self, axis=None, keepdims=False, **_):
        if axis is None:
            return np.asarray(self).mean()
        total = self.sum(axis, keepdims=keepdims)
        return total / total.dtype.type(self.shape[axis])


def plain(leaf):
    return np.asarray(leaf).view(Plain) if np.asarray(leaf).dtype.kind == "f" else leaf


def kernels():
    for op in catalog().values():
        if not op.composite:
            yield Kernel(op.name, "plain", kernel(op))


def kernel(op):
    def run(*args, **attrs):
        result = op.body(*(tree_map(plain, arg) for arg in args), **attrs)
        return tree_map(np.asarray, round_results(op, result, "float32"))

    return run


def tensor(host):
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


plain_backend = simple_backend(
    tensor=tensor, numpy=wrap, kernels=kernels, traits=Traits(block_size=8)
)
