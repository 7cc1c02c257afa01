"""A backend class with every method of contract 1.1, and kernels of its own."""

import numpy as np

from inl.backend.base import Backend, DeviceMemory, Traits
from inl.backend.reference import body_kernel
from inl.backend.simple import plain_state
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.step import Bucket


def tensor(host):
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def linear(x, w):
    y = x @ w.weight.T
    return y if w.bias is None else y + w.bias


def refuse_rows(x, w):
    return "supports at most 16 rows" if x.shape[0] > 16 else None


def sample(logits, step, tables, *, sampler):
    """As in 1.1: the largest logit, token 0 where all are NaN."""
    tokens = np.argmax(logits, axis=-1).astype(np.int32)
    last = tables.last.copy()
    last[step.slots] = tokens.reshape(len(step.slots), -1)[:, -1]
    return tokens, tables._replace(last=last)


def only_greedy(logits, step, tables, *, sampler):
    return None if sampler == "greedy" else f"supports greedy, not {sampler}"


class OldBackend(Backend):
    """Buckets and a ``compile`` with the parameters of contract 1.1."""

    traits = Traits(dtypes=("float32",), block_size=8, depth=2)

    def __init__(self, device):
        self.device = device

    def tensor(self, data, *, axis=None):
        return tensor(data)

    def numpy(self, x):
        return wrap(np.asarray(x))

    def state(self, spec, *, limits):
        return plain_state(spec, limits, self.tensor)

    def memory(self):
        return DeviceMemory(1 << 30, 1 << 29)

    def kernels(self):
        yield Kernel("linear", "old", linear, refuse_rows, preference=1)
        yield Kernel("sample", "old", sample, only_greedy, preference=1)
        for op in catalog().values():
            if not op.composite:
                yield Kernel(op.name, "body", body_kernel(op, "float32"))

    def buckets(self, limits):
        rows = min(8, limits.slots - 1)
        shapes = sorted({(1, 1), (rows, rows), (max(64, rows), rows)})
        return [Bucket(*shape, sampler=s) for shape in shapes for s in limits.samplers]

    def compile(self, function, bucket, *, consumes):
        def program(*args):
            assert all(0 <= index < len(args) for index in consumes)
            return function(*args)

        return program

    def offers(self, kind):
        return None
