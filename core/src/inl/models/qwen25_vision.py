"""Vision encoder of Qwen2.5-VL (Bai et al., 2025): attention in windows of patches.

Its patches are in the order of windows; features leave it in that order too, see
:func:`window_order`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.errors import CheckpointError
from inl.models import groups, mlp
from inl.models.config import one_of, whole
from inl.models.fields import with_defaults
from inl.models.vision_layers import (
    Layer,
    VisionSizes,
    attention,
    changed,
    flat_patches,
    hidden_and_heads,
    padded,
    sequence_starts,
    squares,
)
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
from inl.spec.encoder import Encoder, EncoderLayers, SequenceBatch
from inl.spec.step import Array
from inl.spec.strict_array import StrictArray
from inl.spec.weights import Group

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.adapted import AdaptedCheckpoint
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.images.qwen_patches import Patches
    from inl.ops.protocol import Ops
    from inl.spec.step import Bucket

DEFAULTS: Final = {
    "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420,
    "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 3584,
}  # fmt: skip
"""Defaults of fields of ``vision_config``."""
FULL_LAYERS: Final = (7, 15, 23, 31)
"""Default layers in which all patches of an image see each other."""
EPS: Final = 1e-6
THETA: Final = 10000.0
PATCH: Final = "patch_embed.proj.weight"
"""A convolution whose stride is its size: a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(VisionSizes):
    """Sizes and constants of one checkpoint."""

    window: int
    """Side of a window, in features."""
    full_layers: tuple[int, ...]


class Weights(NamedTuple):
    """Parameters of the whole encoder."""

    patch: Linear | Group
    layers: tuple[Layer[Norm], ...]
    norm: Norm | Group
    first: Linear | Group
    second: Linear | Group


def config(hf: Mapping[str, Any]) -> VisionConfig:
    """Read a ``vision_config``; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    hidden, heads = hidden_and_heads(hf, "num_heads", 4)
    size, merge = whole(hf, "patch_size"), whole(hf, "spatial_merge_size")
    full = hf.get("fullatt_block_indexes", FULL_LAYERS)
    if not isinstance(full, list | tuple) or not all(type(at) is int for at in full):
        raise CheckpointError(
            "config field 'vision_config.fullatt_block_indexes': found "
            f"{full!r:.80}, expected numbers of layers"
        )
    window = whole(hf, "window_size") // merge // size
    if not window:
        raise CheckpointError(
            "config field 'vision_config.window_size': found less than "
            f"{merge * size}, the side of a feature"
        )
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        out_size=whole(hf, "out_hidden_size"),
        layers=whole(hf, "depth"),
        heads=heads,
        patch=whole(hf, "in_channels") * whole(hf, "temporal_patch_size") * size**2,
        merge=merge**2,
        window=window,
        full_layers=tuple(full),
        activation=one_of(hf, "hidden_act", mlp.ACTIVATIONS),
    )


def weights(c: VisionConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    wide = c.merge * c.hidden_size
    return Weights(
        groups.linear(PATCH.removesuffix(".weight"), c.hidden_size, c.patch),
        tuple(_layer(c, f"blocks.{index}.") for index in range(c.layers)),
        groups.norm("merger.ln_q", c.hidden_size),
        groups.linear("merger.mlp.0", wide, wide, bias=True),
        groups.linear("merger.mlp.2", c.out_size, wide, bias=True),
    )


def _layer(c: VisionConfig, at: str) -> Layer[Norm]:
    h, inner = c.hidden_size, c.intermediate_size
    up, gate = (
        groups.linear(f"{at}mlp.{name}_proj", inner, h, bias=True)
        for name in ("up", "gate")
    )
    down = groups.linear(f"{at}mlp.down_proj", h, inner, bias=True)
    return Layer(
        groups.norm(f"{at}norm1", h),
        qkv(h, f"{at}attn.qkv"),
        groups.linear(f"{at}attn.proj", h, h, bias=True),
        groups.norm(f"{at}norm2", h),
        mlp.OpenMlp(up, down, gate),
    )


def qkv(h: int, source: str) -> Group:
    """Return the projections of queries, keys and values, which are stored as one."""
    params = {}
    for number, name in enumerate("qkv"):
        span = ((number * h, (number + 1) * h),)
        params[name] = groups.rows(f"{source}.weight", span, 3 * h, h)
        params[f"{name}_bias"] = groups.rows(f"{source}.bias", span, 3 * h)
    return Group("qkv_linear", **params)


def turning(dim: int) -> RopeScaling:
    """Return the rotation of heads: half of the planes by rows, half by columns."""
    count = dim // 4
    usual = THETA ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    rates = THETA ** (-np.arange(0, 2 * count, 2, dtype=np.float64) / (2 * count))
    divisors = usual / np.concatenate([rates, rates])
    axes = (0,) * count + (1,) * count
    return RopeScaling("divided", divisors=tuple(divisors.tolist()), axes=axes)


def begin(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Return the hidden states [T, H] of patches in the order of windows.

    Behind them are the tables of the rotation.
    """
    x = ops.linear(batch.tokens, w.patch)
    dim = c.hidden_size // c.heads
    cos, sin = ops.axis_rope_table(
        batch.positions, dim=dim, theta=THETA, scaling=turning(dim)
    )
    return x, cos, sin


def layer(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch,
    arrays: tuple[Array, ...], index: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the arrays of :func:`begin` after a layer."""
    (x, cos, sin), own = arrays, w.layers[index]
    bounds = batch.starts if index in c.full_layers else batch.windows
    y = ops.rms_norm(x, own.norm, eps=EPS)
    x = x + attention(ops, c, own, y, bounds, (cos, sin))
    y = ops.rms_norm(x, own.mlp_norm, eps=EPS)
    x = x + mlp.feed_forward(ops, y, own.mlp, c.activation)
    return x, cos, sin


def pool(
    ops: Ops, c: VisionConfig, w: Weights, hidden: tuple[Array, ...],
    _batch: SequenceBatch,
) -> Array:  # fmt: skip
    """Return the features [T / merge, out] of squares of patches."""
    x = ops.rms_norm(hidden[0], w.norm, eps=EPS)
    x = x.reshape(x.shape[0] // c.merge, c.merge * c.hidden_size)
    return ops.linear(ops.activate(ops.linear(x, w.first), kind="gelu"), w.second)


def adapt(c: Any, checkpoint: Checkpoint) -> tuple[Any, AdaptedCheckpoint]:
    """Make the convolution of patches a matrix."""
    return c, changed(checkpoint, {PATCH: flat_patches(c)})


def specs(c: VisionConfig, bucket: Bucket) -> SequenceBatch:
    """Return the specs of a batch."""
    tokens, int32 = bucket.tokens, partial(StrictArray, dtype="int32")
    return SequenceBatch(
        tokens=StrictArray((tokens, c.patch), c.dtype),
        positions=int32((2, tokens)),
        kinds=int32((tokens,)),
        starts=int32((bucket.rows + 1,)),
        windows=int32((tokens // c.merge + 1,)),
    )


def window_order(c: VisionConfig, rows: int, columns: int) -> tuple[Any, Any]:
    """Return the features of an image in the order of windows, and their bounds.

    rows, columns: of features. The order is int64 [features], and the bounds are those
    of patches, int32 [windows + 1].
    """
    at = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        at[top : top + c.window, left : left + c.window].ravel()
        for top in range(0, rows, c.window)
        for left in range(0, columns, c.window)
    ]
    ends = np.cumsum([0, *(len(each) * c.merge for each in windows)])
    return np.concatenate(windows), ends.astype(np.int32)


def image_batch(
    c: VisionConfig, images: Sequence[Patches], bucket: Bucket
) -> tuple[SequenceBatch, NDArray[np.intp]]:
    """Return the batch of images in the size of a bucket, and the order of features."""
    side, used = int(c.merge**0.5), 0
    tokens, positions, orders, ends = [], [], [], [np.zeros(1, np.int32)]
    for values, grid in images:
        order, bounds = window_order(c, grid[0] // side, grid[1] // side)
        tokens.append(values.reshape(len(order), -1)[order].reshape(-1, c.patch))
        positions.append(squares(grid, c.merge)[:, order].reshape(2, -1))
        orders.append(order + used // c.merge)
        ends.append(bounds[1:] + used)
        used += len(values)
    windows = np.full(bucket.tokens // c.merge + 1, used, np.int32)
    joined = np.concatenate(ends)
    windows[: len(joined)] = joined
    batch = SequenceBatch(
        tokens=padded(tokens, bucket.tokens),
        positions=padded(positions, bucket.tokens, axis=1).astype(np.int32),
        kinds=np.zeros(bucket.tokens, np.int32),
        starts=sequence_starts([len(values) for values, _ in images], bucket.rows),
        windows=windows,
    )
    return batch, np.concatenate(orders)


LAYERS: Final = EncoderLayers(begin, layer)
MODEL = Encoder(config, weights, LAYERS.encode, pool, adapt, specs=specs, layers=LAYERS)
