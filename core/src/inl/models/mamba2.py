"""Mamba-2 layers (Dao and Gu, 2024): short convolutions and :data:`ssm_scan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import wrap
from inl.errors import CheckpointError
from inl.models import blocks, groups, hybrid, llama
from inl.models.config import flag, one_of, refuse_unless, whole
from inl.models.mlp import ACTIVATIONS
from inl.models.views import View
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.recurrent import Taps
from inl.ops.ssm import Ssm
from inl.spec.cache import Paged, Slotted, State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

LIMIT: Final = "time_step_limit"
INFINITE: Final = {"__float__": "Infinity"}
"""Infinity as transformers writes it."""
LIMITS: Final = (
    None, [0.0, float("inf")], [0.0, INFINITE], (0.0, float("inf"))
)  # fmt: skip
"""Accepted values of the field, all of which mean no limit."""
ONES: Final = "norm.ones"
"""Name of the weights of a norm that has none."""
RENAMES: Final = {
    r"^model\.final_layernorm\.": "model.norm.",
    r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
    r"\.feed_forward\.": ".mlp.",
}
"""Patterns of tensor names of Bamba and Falcon-H1, and Llama's names for them."""
PARTS: Final = ("value", "key", "query")
"""What the convolution reads, in the order of the checkpoint: x, B and C."""


class Sizes(NamedTuple):
    """Sizes of the layers of one checkpoint."""

    heads: int
    head_dim: int
    groups: int
    """Heads of keys and queries, a divisor of ``heads``."""
    state_dim: int
    """Size of a key or a query."""
    taps: int
    """Tokens that the convolution reads, the newest included."""
    conv_bias: bool
    activation: str

    @property
    def inner(self) -> int:
        """Lanes of values, of gates and of results."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Lanes of the keys, and of the queries."""
        return self.groups * self.state_dim

    @property
    def rows(self) -> int:
        """Rows of the projection of the input."""
        return 2 * self.inner + 2 * self.keys + self.heads

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of the convolution of each of :data:`PARTS`."""
        return self.inner, self.keys, self.keys


class Part(NamedTuple):
    """Weights of one of :data:`PARTS`: groups, replaced by tensors when loaded."""

    project: Linear | Group
    taps: Taps | Group
    shift: Norm | Group | None
    """Added to the result of the convolution."""


class Mixer(NamedTuple):
    """Weights of :func:`mix`: groups, replaced by tensors when loaded."""

    value: Part
    key: Part
    query: Part
    gate: Linear | Group
    time: Linear | Group
    """[heads, H]: steps of time before the bias and the softplus."""
    scan: Ssm | Group
    out: Linear | Group
    norm: Norm | Group | None
    """[inner], applied to the gated results of each group of heads."""
    ones: Norm | Group | None
    """[inner / groups]: ones, if there are several groups."""


class Factors(NamedTuple):
    """Constant factors on the input of each projection."""

    gate: float = 1.0
    value: float = 1.0
    key: float = 1.0
    query: float = 1.0
    time: float = 1.0


PLAIN: Final = Factors()


def read(hf: Mapping[str, Any], inner: int) -> Sizes:
    """Read the sizes, by the names of Bamba; raises :class:`CheckpointError`.

    inner: default of the lanes of values.
    """
    heads, grouped = whole(hf, "mamba_n_heads", 128), whole(hf, "mamba_n_groups", 1)
    if inner % heads or heads % grouped:
        raise CheckpointError(
            f"config field 'mamba_n_heads': found {heads}, expected a divisor of "
            f"{inner} lanes and a multiple of mamba_n_groups, {grouped}"
        )
    if hf.get("mamba_d_head") != "auto":
        refuse_unless(hf, "mamba_d_head", inner // heads)
    hf.get("mamba_chunk_size")  # no effect on the results
    refuse_unless(hf, "mamba_proj_bias", False)
    if hf.get(LIMIT) not in LIMITS:
        refuse_unless(hf, LIMIT, LIMITS[1])
    return Sizes(
        heads,
        inner // heads,
        grouped,
        whole(hf, "mamba_d_state", 256),
        whole(hf, "mamba_d_conv", 4, least=2),
        flag(hf, "mamba_conv_bias", True),
        one_of(hf, "hidden_act", ACTIVATIONS),
    )


def weights(
    s: Sizes, stem: str, h: int, *, normed: bool = True, out_bias: bool = False
) -> Mixer:
    """Return the groups of the module ``stem`` of a layer with ``h`` hidden lanes."""
    bounds = list(pairwise(accumulate((s.inner, *s.channels))))
    last = bounds[-1][1]
    vectors = {
        name: Param(f"{stem}.{source}", (s.heads,), finite=True, wide=True)
        for name, source in (("rate", "A_log"), ("shift", "dt_bias"))
    }
    vectors |= {
        name: Param(f"{stem}.{source}", (s.heads,))
        for name, source in (("bias", "dt_bias"), ("skip", "D"))
    }
    value, key, query = (_part(s, stem, h, *each) for each in bounds)
    return Mixer(
        value,
        key,
        query,
        gate=_project(s, stem, h, ((0, s.inner),)),
        time=_project(s, stem, h, ((last, last + s.heads),)),
        scan=Group("ssm_scan", **vectors),
        out=groups.linear(f"{stem}.out_proj", h, s.inner, bias=out_bias),
        norm=_vector(f"{stem}.norm.weight", s.inner) if normed else None,
        ones=_vector(f"{stem}.{ONES}", s.inner // s.groups)
        if normed and s.groups > 1
        else None,
    )


def _part(s: Sizes, stem: str, h: int, start: int, stop: int) -> Part:
    """Return one of :data:`PARTS`, the rows [start, stop) of the projection."""
    spans, total = ((start - s.inner, stop - s.inner),), sum(s.channels)
    taps = _rows(f"{stem}.conv1d.weight", spans, total, 1, s.taps)
    shift = _rows(f"{stem}.conv1d.bias", spans, total)
    return Part(
        _project(s, stem, h, ((start, stop),)),
        Group("causal_conv", weight=taps),
        Group("rms_norm", weight=shift) if s.conv_bias else None,
    )


def _project(s: Sizes, stem: str, h: int, spans: groups.Spans) -> Group:
    return Group("linear", weight=_rows(f"{stem}.in_proj.weight", spans, s.rows, h))


def _rows(source: str, spans: groups.Spans, total: int, *width: int) -> Param:
    return groups.rows(source, spans, total, *width)._replace(axis=None)


def _vector(source: str, size: int) -> Group:
    return Group("rms_norm", weight=Param(source, (size,)))


def with_ones(
    s: Sizes, checkpoint: Checkpoint, layers: Iterable[int], module: str = "mamba"
) -> Checkpoint:
    """Return a checkpoint with the weights of norms that have none, which are ones.

    module: name of the recurrent module of each of ``layers``.
    """
    if s.groups == 1:
        return checkpoint
    names = checkpoint.names()
    ones = wrap(np.ones(s.inner // s.groups, np.float32))
    pieces = {
        f"model.layers.{index}.{module}.{ONES}": Piece(
            (names[0],), ones.shape, lambda _stored: ones
        )
        for index in layers
    }
    pieces |= {name: Piece((name,), checkpoint.spec(name)[1]) for name in names}
    return AdaptedCheckpoint(checkpoint, pieces)


class Block(NamedTuple):
    """Weights of a block: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    mixer: Mixer


def in_layer(c: Any, index: int, plain: llama.Layer) -> llama.Layer:
    """Return a layer with Mamba-2 in place of attention if the layer is recurrent.

    c: a config with ``recurrent`` and ``mamba``.
    """
    if not c.recurrent[index]:
        return plain
    stem = f"model.layers.{index}.mamba"
    mixer = Block(plain.attention.norm, weights(c.mamba, stem, c.hidden_size))
    return plain._replace(attention=mixer)


def states(c: Any) -> tuple[Paged | Slotted, ...]:
    """Return the cache group of the layers with attention, then recurrent state.

    c: a config with ``recurrent`` and ``mamba``.
    """
    found: tuple[Paged | Slotted, ...] = (hybrid.attention_state(c),)
    for index, recurs in enumerate(c.recurrent):
        found += state(c.mamba, index, c.dtype) if recurs else ()
    return found


def mixed(
    ops: Ops, c: Any, w: Block | blocks.Attention, carry: blocks.Carry, step: Step,
    state: State, index: int, view: View, sampled_step: Step | None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Block of attention, or of Mamba-2 where ``w`` is one."""
    if not isinstance(w, Block):
        return blocks.attention(
            ops, c, w, carry, step, state, index=hybrid.cache_index(c, index),
            view=view, sampled_step=sampled_step,
        )  # fmt: skip
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    out, state = mix(
        ops, c.mamba, w.mixer, x, step, state, index, sampled_step, eps=c.norm_eps
    )
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    delta = ops.linear(out, w.mixer.out)
    return carry._replace(residual=residual, delta=delta), state


def state(s: Sizes, index: int, dtype: str) -> tuple[Slotted, ...]:
    """Return the state of a layer: inputs of convolutions, and a matrix per head."""
    wide = "float64" if dtype == "float64" else "float32"
    shape = s.heads, s.state_dim, s.head_dim
    return (
        *(
            Slotted(_name(name, index), (s.taps - 1, count), dtype, "tokens")
            for name, count in zip(PARTS, s.channels, strict=True)
        ),
        Slotted(_name("matrix", index), shape, wide, "tokens"),
    )


def _name(part: str, index: int) -> str:
    """Return the name of a slotted state of a layer."""
    return f"mamba.{index}.{part}"


def mix(
    ops: Ops, s: Sizes, w: Mixer, x: Array, step: Step, state: State, index: int,
    sampled_step: Step | None, *, eps: float, factors: Factors = PLAIN,
    norm_first: bool = False,
) -> tuple[Array, State]:  # fmt: skip
    """Return the layer's results for ``x`` [T, H] before the output projection.

    All tokens change the state; with ``sampled_step``, the results are those of the
    sampled tokens, [R, inner]. norm_first: whether the norm comes before the gate.
    """
    tables, tokens = dict(state.slotted), x.shape[0]

    def read(part: Part, name: str, factor: float, heads: int) -> Array:
        key = _name(name, index)
        found, tables[key] = ops.causal_conv(
            ops.linear(_scaled(x, factor), part.project), tables[key], step, part.taps
        )
        if part.shift is not None:
            found = found + groups.vector(part.shift)
        found = ops.activate(found, kind=s.activation)
        return found.reshape(tokens, heads, -1)

    value = read(w.value, "value", factors.value, s.heads)
    key = read(w.key, "key", factors.key, s.groups)
    query = read(w.query, "query", factors.query, s.groups)
    time = ops.linear(_scaled(x, factors.time), w.time)
    matrix = _name("matrix", index)
    out, tables[matrix] = ops.ssm_scan(
        value, key, query, time, tables[matrix], step, w.scan
    )
    out = out.reshape(tokens, s.inner)
    if sampled_step is not None:
        out, x = ops.take_rows(out, step.samples), ops.take_rows(x, step.samples)
    gate = ops.linear(_scaled(x, factors.gate), w.gate)
    if norm_first:
        out = _normed(ops, s, w, out, eps)
    out = ops.gated_activation(gate, out, activation="silu")
    if not norm_first:
        out = _normed(ops, s, w, out, eps)
    return out, state._replace(slotted=tables)


def _scaled(x: Array, factor: float) -> Array:
    return x if factor == 1.0 else x * factor


def _normed(ops: Ops, s: Sizes, w: Mixer, out: Array, eps: float) -> Array:
    """Normalize each group of heads [T, inner]."""
    if w.norm is None:
        return out
    if w.ones is None:
        return ops.rms_norm(out, w.norm, eps=eps)
    parts = out.reshape(out.shape[0], s.groups, -1)
    parts = ops.rms_norm(parts, w.ones, eps=eps)
    return parts.reshape(out.shape[0], -1) * groups.vector(w.norm)
