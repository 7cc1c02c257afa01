"""Mamba-2 layers (Dao and Gu, 2024): short convolutions and :data:`ssm_scan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray, wrap
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
SCALE: Final = "conv1d.scale"
"""Name of constant factors on the results of a convolution."""


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
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner + 2 * self.keys

    @property
    def rows(self) -> int:
        """Rows of the projection of the input: gates, channels, steps of time."""
        return self.inner + self.channels + self.heads


class Mixer(NamedTuple):
    """Weights of :func:`mix`: groups, replaced by tensors when loaded."""

    project: Linear | Group
    """[rows, H]."""
    taps: Taps | Group
    scale: Norm | Group | None
    """[channels]: factor on the results of the convolution."""
    shift: Norm | Group | None
    """[channels], added to them."""
    scan: Ssm | Group
    out: Linear | Group
    norm: Norm | Group | None
    """[inner], applied to the gated results of each group of heads."""
    ones: Norm | Group | None
    """[inner / groups]: ones, if there are several groups."""


class Factors(NamedTuple):
    """Constant factors on the parts of the projection of the input."""

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
    s: Sizes, stem: str, h: int, *, normed: bool = True, out_bias: bool = False,
    scaled: bool = False,
) -> Mixer:  # fmt: skip
    """Return the groups of the module ``stem`` of a layer with ``h`` hidden lanes."""
    vectors = {
        name: Param(f"{stem}.{source}", (s.heads,), finite=True, wide=True)
        for name, source in (("rate", "A_log"), ("shift", "dt_bias"))
    }
    vectors |= {
        name: Param(f"{stem}.{source}", (s.heads,))
        for name, source in (("bias", "dt_bias"), ("skip", "D"))
    }
    taps = Param(f"{stem}.conv1d.weight", (s.channels, 1, s.taps))
    return Mixer(
        groups.linear(f"{stem}.in_proj", s.rows, h),
        Group("causal_conv", weight=taps),
        scale=_vector(f"{stem}.{SCALE}", s.channels) if scaled else None,
        shift=_vector(f"{stem}.conv1d.bias", s.channels) if s.conv_bias else None,
        scan=Group("ssm_scan", **vectors),
        out=groups.linear(f"{stem}.out_proj", h, s.inner, bias=out_bias),
        norm=_vector(f"{stem}.norm.weight", s.inner) if normed else None,
        ones=_vector(f"{stem}.{ONES}", s.inner // s.groups)
        if normed and s.groups > 1
        else None,
    )


def _vector(source: str, size: int) -> Group:
    return Group("rms_norm", weight=Param(source, (size,)))


def with_constants(
    s: Sizes, checkpoint: Checkpoint, layers: Iterable[int], module: str = "mamba",
    *, normed: bool = True, factors: Factors = PLAIN,
) -> Checkpoint:  # fmt: skip
    """Return a checkpoint with the constants that are weights here.

    They are the weights of norms that have none, which are ones, and factors that
    differ between the channels of a convolution. module: name of the recurrent module
    of each of ``layers``.
    """
    constants = {}
    if normed and s.groups > 1:
        constants[ONES] = np.ones(s.inner // s.groups)
    if is_scaled(factors):
        parts = (factors.value, s.inner), (factors.key, s.keys), (factors.query, s.keys)
        constants[SCALE] = np.concatenate([np.full(n, each) for each, n in parts])
    if not constants:
        return checkpoint
    names = checkpoint.names()
    pieces = {name: Piece((name,), checkpoint.spec(name)[1]) for name in names}
    for name, values in constants.items():
        array = wrap(values.astype(np.float32))
        for index in layers:
            stem = f"model.layers.{index}.{module}"
            # The dtype of a source is that of the piece: no matrix, which has any.
            source = (f"{stem}.A_log",)
            pieces[f"{stem}.{name}"] = Piece(
                source, array.shape, partial(_constant, array)
            )
    return AdaptedCheckpoint(checkpoint, pieces)


def is_scaled(factors: Factors) -> bool:
    """Whether the results of convolutions have factors."""
    return factors[1:4] != (1.0, 1.0, 1.0)


def _constant(array: HostArray, _stored: Any) -> HostArray:
    return array


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
    inputs, matrix = names(index)
    return (
        Slotted(
            inputs, (s.taps - 1, s.channels), dtype, "tokens", ("snapshot", "drafts")
        ),
        Slotted(
            matrix,
            (s.heads, s.state_dim, s.head_dim),
            wide,
            "tokens",
            ("snapshot", "drafts"),
        ),
    )


def names(index: int) -> tuple[str, str]:
    """Return the names of the slotted state of a layer."""
    return f"mamba.{index}.inputs", f"mamba.{index}.matrix"


def mix(
    ops: Ops, s: Sizes, w: Mixer, x: Array, step: Step, state: State, index: int,
    sampled_step: Step | None, *, eps: float, factors: Factors = PLAIN,
    norm_first: bool = False,
) -> tuple[Array, State]:  # fmt: skip
    """Return the layer's results for ``x`` [T, H] before the output projection.

    All tokens change the state; with ``sampled_step``, the results are those of the
    sampled tokens, [R, inner]. norm_first: whether the norm comes before the gate.
    """
    inputs, matrix = names(index)
    tables, tokens = dict(state.slotted), x.shape[0]
    projected = ops.linear(x, w.project)
    mixed, tables[inputs] = ops.causal_conv(
        projected[:, s.inner : -s.heads], tables[inputs], step, w.taps
    )
    if w.scale is not None:
        mixed = mixed * groups.vector(w.scale)
    if w.shift is not None:
        mixed = mixed + groups.vector(w.shift)
    mixed = ops.activate(mixed, kind=s.activation)
    last = s.inner + s.keys
    out, tables[matrix] = ops.ssm_scan(
        mixed[:, : s.inner].reshape(tokens, s.heads, s.head_dim),
        mixed[:, s.inner : last].reshape(tokens, s.groups, s.state_dim),
        mixed[:, last:].reshape(tokens, s.groups, s.state_dim),
        _scaled(projected[:, -s.heads :], factors.time), tables[matrix], step, w.scan,
    )  # fmt: skip
    out, gate = out.reshape(tokens, s.inner), projected[:, : s.inner]
    if sampled_step is not None:
        out, gate = (ops.take_rows(each, step.samples) for each in (out, gate))
    gate = _scaled(gate, factors.gate)
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
