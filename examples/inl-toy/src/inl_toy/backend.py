"""The toy device: NumPy in float32, six kernels, and op bodies for the rest."""

import numpy as np

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel


def tensor(host):
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def linear(x, w):
    y = x @ w.weight.T
    return y if w.bias is None else y + w.bias


def rms_norm(x, w, *, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w.weight


def rope(q, k, cos, sin):
    rotation = (cos + 1j * sin)[:, None]
    half = cos.shape[-1]
    rotated = [(x[..., :half] + 1j * x[..., half:]) * rotation for x in (q, k)]
    return tuple(np.concatenate([z.real, z.imag], -1) for z in rotated)


def gated_activation(gate, up, *, activation):
    return gate / (1 + np.exp(np.minimum(-gate, 80))) * up


def only_silu(gate, up, *, activation):
    return None if activation == "silu" else f"supports silu, not {activation}"


def write_kv(k, v, cache, writes):
    cells = np.divmod(writes, cache.k.shape[1])
    cache.k[cells], cache.v[cells] = k, v
    return cache


def attention(q, cache, step, *, scale, window, cap, group):
    out, (heads, dim) = np.zeros_like(q), q.shape[1:]
    for row in np.flatnonzero(step.lengths):
        tokens, length = slice(*step.starts[row : row + 2]), step.lengths[row]
        blocks = (part[step.blocks[group, row]] for part in cache[:2])
        k, v = (x.reshape(-1, x.shape[2], dim)[:length] for x in blocks)
        k, v = (x.repeat(heads // x.shape[1], 1).swapaxes(0, 1) for x in (k, v))
        scores = q[tokens].swapaxes(0, 1) @ k.swapaxes(1, 2) * np.float32(scale)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        distance = step.positions[tokens, None] - np.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        scores = np.where(mask, scores, np.float32(-1e30))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[tokens] = (weights @ v).swapaxes(0, 1)
    return out


def kernels():
    for run in (linear, rms_norm, rope, write_kv, attention):
        yield Kernel(run.__name__, "toy", run, preference=1)
    yield Kernel("gated_activation", "toy", gated_activation, only_silu, preference=1)
    for op in catalog().values():
        if not op.composite:
            yield Kernel(op.name, "body", body_kernel(op, "float32"))


Backend = simple_backend(
    tensor=tensor, numpy=wrap, kernels=kernels, traits=Traits(dtypes=("float32",))
)
