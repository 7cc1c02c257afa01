"""Vision encoder of Gemma 4 (Gemma team, 2026): patches with places, pooled in squares.

Heads are normalized and turn by columns in one half and by rows in the other. Small
models bound the inputs and outputs of linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.dtypes import HostArray, rounded, widen, wrap
from inl.errors import CheckpointError
from inl.models import groups, mlp
from inl.models.config import fields_of, flag, number, one_of, refuse_unless, whole
from inl.models.fields import with_defaults
from inl.models.vision_layers import (
    VisionSizes,
    changed,
    padded,
    sequence_starts,
    squares,
)
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
from inl.spec.encoder import Encoder, EncoderLayers, SequenceBatch
from inl.spec.step import Array
from inl.spec.strict_array import StrictArray
from inl.spec.weights import Group, Param, RowSlices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.checkpoint import Checkpoint
    from inl.images.qwen_patches import Patches
    from inl.ops.protocol import Ops
    from inl.spec.step import Bucket

DEFAULTS: Final = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
    "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh", "patch_size": 16,
    "pooling_kernel_size": 3, "position_embedding_size": 10240,
}  # fmt: skip
"""Defaults of fields of ``vision_config``."""
NAMES: Final = {"vision_tower.": "", "embed_vision.": "projector."}
"""Prefixes of tensors, and those of the weights below."""
THETA: Final = 100.0
"""Default base frequency of the rotation."""
CHANNELS: Final = 3
PATCH, PLACES = "patch_embedder.input_proj.weight", "patch_embedder.places.weight"
TABLE: Final = "patch_embedder.position_embedding_table"
"""[2, P, H]: of columns and of rows."""
BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
"""Tensors of a bounded linear layer."""
OUT_NORM: Final = "projector.norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(VisionSizes):
    """Sizes and constants of one checkpoint."""

    kv_heads: int
    head_dim: int
    side: int
    """Columns, and rows, that have places."""
    eps: float
    theta: float
    is_bounded: bool
    is_standardized: bool


class Bounds(NamedTuple):
    """Bounds [1] of the inputs and outputs of a linear layer, of groups of a norm."""

    low: Any
    high: Any
    out_low: Any
    out_high: Any


class Bounded(NamedTuple):
    """A linear layer, with bounds where a model has them."""

    linear: Linear | Group
    bounds: Bounds | None


class Layer(NamedTuple):
    """Parameters of one layer: norms are before and after each of its blocks."""

    norm: Norm | Group
    q: Bounded
    k: Bounded
    v: Bounded
    q_norm: Norm | Group
    k_norm: Norm | Group
    v_norm: Norm | Group
    out: Bounded
    out_norm: Norm | Group
    mlp_norm: Norm | Group
    gate: Bounded
    up: Bounded
    down: Bounded
    mlp_out_norm: Norm | Group


class Weights(NamedTuple):
    """Parameters of the whole encoder."""

    patch: Linear | Group
    places: Embedding | Group
    layers: tuple[Layer, ...]
    mean: Norm | Group | None
    """[H]: subtracted from pooled patches."""
    scale: Norm | Group | None
    """[H]: their factors then."""
    norm: Norm | Group
    out: Linear | Group


def fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the encoder in the config of the whole model."""
    hf = with_defaults(model["vision_config"], DEFAULTS)
    text = model.get("text_config") or {}
    return hf.changed({"out": whole(text, "hidden_size", 2304)})


def config(hf: Mapping[str, Any]) -> VisionConfig:
    """Read the fields; raises :class:`CheckpointError` naming the field."""
    refuse_unless(hf, "attention_bias", False)
    heads, kv_heads = whole(hf, "num_attention_heads"), whole(hf, "num_key_value_heads")
    dim, rope = whole(hf, "head_dim"), fields_of(hf, "rope_parameters")
    if dim % 4 or heads != kv_heads:
        raise CheckpointError(
            f"config field 'vision_config.head_dim': found {dim} of {heads} heads, "
            f"{kv_heads} of keys, accepted: a multiple of 4, and as many of both"
        )
    if (kind := rope.get("rope_type", "axial")) not in ("axial", "default"):
        raise CheckpointError(
            f"config field 'vision_config.rope_parameters': found {kind!r:.80}, "
            "accepted: axial"
        )
    return VisionConfig(
        hidden_size=whole(hf, "hidden_size"),
        intermediate_size=whole(hf, "intermediate_size"),
        out_size=whole(hf, "out"),
        layers=whole(hf, "num_hidden_layers"),
        heads=heads,
        patch=CHANNELS * whole(hf, "patch_size") ** 2,
        merge=whole(hf, "pooling_kernel_size") ** 2,
        activation=one_of(hf, "hidden_activation", mlp.ACTIVATIONS),
        kv_heads=kv_heads,
        head_dim=dim,
        side=whole(hf, "position_embedding_size"),
        eps=number(hf, "rms_norm_eps", 1e-6),
        theta=number(rope, "rope_theta", THETA),
        is_bounded=flag(hf, "use_clipped_linears", False),
        is_standardized=flag(hf, "standardize", False),
    )


def weights(c: VisionConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    h = c.hidden_size

    def vector(name: str) -> Group | None:
        param = Param(name, (h,), wide=True)
        return Group("rms_norm", weight=param) if c.is_standardized else None

    return Weights(
        groups.linear(PATCH.removesuffix(".weight"), h, c.patch),
        Group("embedding", weight=Param(PLACES, (2 * c.side, h))),
        tuple(_layer(c, f"encoder.layers.{index}.") for index in range(c.layers)),
        vector("std_bias"),
        vector("std_scale"),
        groups.norm(OUT_NORM.removesuffix(".weight"), h),
        groups.linear("projector.embedding_projection", c.out_size, h),
    )


def _layer(c: VisionConfig, at: str) -> Layer:
    h, inner, dim = c.hidden_size, c.intermediate_size, c.head_dim
    norm = partial(groups.norm, size=h)

    def bounded(name: str, rows: int, columns: int, *, turns: bool = False) -> Bounded:
        stem = f"{at}{name}"
        weight = Param(f"{stem}.linear.weight", (rows, columns))
        if turns:
            weight = weight._replace(row_slices=_turned(dim, c.heads))
        found = Group("linear", weight=weight)
        if not c.is_bounded:
            return Bounded(found, None)
        scalars = (Param(f"{stem}.{name}", (1,), wide=True) for name in BOUNDS)
        return Bounded(
            found, Bounds(*(Group("rms_norm", weight=each) for each in scalars))
        )

    def head_norm(name: str, *, turns: bool) -> Group:
        weight = Param(f"{at}self_attn.{name}_norm.weight", (dim,))
        if turns:
            weight = weight._replace(row_slices=_turned(dim, 1))
        return Group("rms_norm", weight=weight)

    wide = c.heads * dim
    return Layer(
        norm(f"{at}input_layernorm"),
        bounded("self_attn.q_proj", wide, h, turns=True),
        bounded("self_attn.k_proj", wide, h, turns=True),
        bounded("self_attn.v_proj", wide, h),
        head_norm("q", turns=True),
        head_norm("k", turns=True),
        head_norm("v", turns=False),
        bounded("self_attn.o_proj", h, wide),
        norm(f"{at}post_attention_layernorm"),
        norm(f"{at}pre_feedforward_layernorm"),
        bounded("mlp.gate_proj", inner, h),
        bounded("mlp.up_proj", inner, h),
        bounded("mlp.down_proj", h, inner),
        norm(f"{at}post_feedforward_layernorm"),
    )


def _turned(dim: int, heads: int) -> RowSlices:
    """Return the rows of heads whose lanes are as ``rope`` has them.

    Stored are both lanes of planes that turn by columns, then both of those by rows.
    """
    order = np.arange(dim).reshape(2, 2, dim // 4).swapaxes(0, 1).ravel().tolist()
    return RowSlices(groups.head_rows(order, dim, heads), heads * dim)


def turning(dim: int, theta: float) -> RopeScaling:
    """Return the rotation of heads: the first planes turn by columns, others by rows.

    Both have the same frequencies.
    """
    usual = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    divisors = usual / np.concatenate([usual[::2], usual[::2]])
    axes = (0,) * (dim // 4) + (1,) * (dim // 4)
    return RopeScaling("divided", divisors=tuple(divisors.tolist()), axes=axes)


def begin(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Return the hidden states [T, H] of patches, and the tables of the rotation.

    ``batch.kinds`` has the rows [2, T] of the table of places.
    """
    x = ops.linear(batch.tokens, w.patch)
    for axis in range(2):
        x = x + ops.embedding(batch.kinds[axis], w.places)
    cos, sin = ops.axis_rope_table(
        batch.positions, dim=c.head_dim, theta=c.theta,
        scaling=turning(c.head_dim, c.theta),
    )  # fmt: skip
    return x, cos, sin


def layer(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch,
    arrays: tuple[Array, ...], index: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the arrays of :func:`begin` after a layer."""
    (x, cos, sin), own = arrays, w.layers[index]
    norm, tokens = partial(ops.rms_norm, eps=c.eps), x.shape[0]
    y = norm(x, own.norm)
    q, k, v = (
        norm(bounded(ops, y, each).reshape(tokens, c.heads, c.head_dim), scale)
        for each, scale in (
            (own.q, own.q_norm), (own.k, own.k_norm), (own.v, own.v_norm),
        )
    )  # fmt: skip
    q, k = ops.rope(q, k, cos, sin)
    mixed = ops.full_attention(q, k, v, batch.starts, scale=1.0, window=None)
    mixed = mixed.reshape(tokens, c.heads * c.head_dim)
    x = x + norm(bounded(ops, mixed, own.out), own.out_norm)
    y = norm(x, own.mlp_norm)
    gate, up = bounded(ops, y, own.gate), bounded(ops, y, own.up)
    y = ops.gated_activation(gate, up, activation=c.activation)
    return x + norm(bounded(ops, y, own.down), own.mlp_out_norm), cos, sin


def bounded(ops: Ops, x: Array, w: Bounded) -> Array:
    """Return a linear layer of ``x``, both within the bounds."""
    if w.bounds is None:
        return ops.linear(x, w.linear)
    low, high, out_low, out_high = (each.weight for each in w.bounds)
    return _clamped(ops, ops.linear(_clamped(ops, x, low, high), w.linear),
                    out_low, out_high)  # fmt: skip


def _clamped(ops: Ops, x: Array, low: Array, high: Array) -> Array:
    """Return ``x`` within bounds [1]; what is within them is not rounded."""
    above = ops.activate(x - high, kind="relu")
    below = ops.activate(x * -1.0 + low, kind="relu")
    return x - above + below


def pool(
    ops: Ops, c: VisionConfig, w: Weights, arrays: tuple[Array, ...],
    batch: SequenceBatch,
) -> Array:  # fmt: skip
    """Return the features [T / merge, out] of squares of patches.

    They are divided by what the language model multiplies all embeddings with.
    """
    x = ops.pool(arrays[0], batch.windows, kind="mean")
    if w.mean is not None and w.scale is not None:
        x = (x - groups.vector(w.mean)) * groups.vector(w.scale)
    # The published model multiplies by the root of H first, which may overflow; the
    # norm makes that a matter of its epsilon.
    x = ops.rms_norm(x, w.norm, eps=c.eps / c.hidden_size)
    factor = float(rounded(np.array(c.out_size**0.5, np.float32), c.dtype))
    return ops.linear(x, w.out) * (1 / factor)


def adapt(c: VisionConfig, checkpoint: Checkpoint) -> tuple[Any, AdaptedCheckpoint]:
    """Order the numbers of patches by channels, and add the norms without weights."""
    h, size = c.hidden_size, int((c.patch // CHANNELS) ** 0.5 + 0.5)

    def by_channel(stored: Sequence[HostArray]) -> HostArray:
        pixels = stored[0].data.reshape(h, size, size, CHANNELS)
        data = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(h, c.patch)
        return replace(stored[0], data=data, shape=data.shape)

    def flat(shape: tuple[int, ...], stored: Sequence[HostArray]) -> HostArray:
        return replace(stored[0], data=stored[0].data.reshape(shape), shape=shape)

    def divided(stored: Sequence[HostArray]) -> HostArray:
        return wrap(widen(stored[0]).astype(np.float32) / np.float32(h**0.5))

    changes: dict[str, Any] = {PATCH: ((h, c.patch), by_channel)}
    for name in checkpoint.names():
        if name.endswith(BOUNDS):
            changes[name] = ((1,), partial(flat, (1,)))
    if c.is_standardized:
        changes["std_bias"] = ((h,), divided)
    found, table = changed(checkpoint, changes), (2 * c.side, h)
    pieces = {name: Piece((name,), found.spec(name)[1]) for name in found.names()}
    if TABLE in pieces:
        pieces[PLACES] = Piece((TABLE,), table, partial(flat, table))
        del pieces[TABLE]
    for name in found.names():
        if name.endswith(".k_norm.weight"):
            other = name.replace(".k_norm.", ".v_norm.")
            pieces[other] = Piece((name,), (c.head_dim,), partial(_ones, c.head_dim))
    if PATCH in pieces:
        pieces[OUT_NORM] = Piece((PATCH,), (h,), partial(_ones, h))
    return c, AdaptedCheckpoint(found, pieces)


def _ones(size: int, _stored: Any) -> HostArray:
    """Return the weight of a norm that has none."""
    return wrap(np.ones(size, np.float32))


def specs(c: VisionConfig, bucket: Bucket) -> SequenceBatch:
    """Return the specs of a batch."""
    tokens, int32 = bucket.tokens, partial(StrictArray, dtype="int32")
    return SequenceBatch(
        tokens=StrictArray((tokens, c.patch), c.dtype),
        positions=int32((2, tokens)),
        kinds=int32((2, tokens)),
        starts=int32((bucket.rows + 1,)),
        windows=int32((tokens // c.merge + 1,)),
    )


def image_batch(
    c: VisionConfig, images: Sequence[Patches], bucket: Bucket
) -> tuple[SequenceBatch, NDArray[np.intp]]:
    """Return the batch of images in the size of a bucket, and the order of features."""
    # Columns come first in positions and in the table.
    places = [squares(grid, c.merge)[::-1].reshape(2, -1) for _, grid in images]
    positions = padded(places, bucket.tokens, axis=1).astype(np.int32)
    used = sum(len(values) for values, _ in images)
    windows = np.minimum(np.arange(bucket.tokens // c.merge + 1) * c.merge, used)
    batch = SequenceBatch(
        tokens=padded([values for values, _ in images], bucket.tokens),
        positions=positions,
        kinds=positions + np.array([[0], [c.side]], np.int32),
        starts=sequence_starts([len(values) for values, _ in images], bucket.rows),
        windows=windows.astype(np.int32),
    )
    return batch, np.arange(used // c.merge)


LAYERS: Final = EncoderLayers(begin, layer)
MODEL = Encoder(config, weights, LAYERS.encode, pool, adapt, specs=specs, layers=LAYERS)
