"""Layers of a checkpoint that predict further tokens (MTP; DeepSeek-AI, 2024).

One more decoder layer of the model's own kind predicts tokens from the model's last
normalized hidden states. The entry of position p is computed from the hidden state of
token p and the embedding of token p + 1, and predicts token p + 2. After the last known
position the layer's own normalized output takes the place of the hidden state. Where a
checkpoint has several such layers, the first one is used for all drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.models import groups
from inl.models.draft_module import DraftModule, Hidden, begin, join_columns
from inl.models.views import FULL
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.cache import Paged, State
from inl.spec.model import Model
from inl.spec.step import Array
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class Names(NamedTuple):
    """Names of the tensors of a layout; ``{}`` is the number of the model's layers."""

    layer: str
    """Prefix of the decoder layer."""
    embed_norm: str
    hidden_norm: str
    join: str
    norm: str
    hidden_first: bool = False
    """Whether the hidden state comes before the embedding in the input of ``join``."""


LAYOUTS: Final = (
    Names(
        "model.layers.{}.", "model.layers.{}.enorm", "model.layers.{}.hnorm",
        "model.layers.{}.eh_proj", "model.layers.{}.shared_head.norm",
    ),
    Names(
        "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden",
        "mtp.fc", "mtp.norm",
    ),
    Names(
        "model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm",
        "model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.final_layernorm", hidden_first=True,
    ),
)  # fmt: skip
"""Those of DeepSeek-V3 and V3.2, GLM-4.5 and GLM-5, of Qwen3-Next and Qwen3.5, and of
MiMo."""
COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's tensors that layers of the first layout have."""


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Sizes and constants of a layer that predicts further tokens."""

    model: Model
    """Of the target."""
    layer: Any
    """The target's config with this layer alone, of the same kind as its last one."""
    layers: int
    """Number of the target's layers."""
    hidden_first: bool

    def in_dtype(self, dtype: str) -> MtpConfig:
        """Return the config with another compute dtype."""
        return replace(self, layer=replace(self.layer, dtype=dtype))

    @property
    def dtype(self) -> str:
        return str(self.layer.dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        """The output of the target's last layer."""
        return (self.layers,)

    @property
    def hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def tapped(self) -> int:
        return self.hidden_size

    @property
    def draft_vocab(self) -> int:
        return int(self.layer.vocab_size)


class Weights(NamedTuple):
    """Parameters of the layer, and those that it shares with the target.

    The first four are those of a model with one layer.
    """

    embed: Embedding | Group | None
    layers: tuple[Any, ...]
    norm: Norm | Group
    head: Linear | Group | None
    target_norm: Any
    """The target's last norm; ``None`` in the tree."""
    embed_norm: Norm | Group
    hidden_norm: Norm | Group
    join: Linear | Group
    """[H, 2 H]."""


def find_names(names: list[str], layers: int) -> Names | None:
    """Return the names of a checkpoint's layout, if it has such a layer."""
    for layout in LAYOUTS:
        found = layout._replace(**{
            name: getattr(layout, name).format(layers) for name in ("layer", *_OWN)
        })  # fmt: skip
        if f"{found.join}.weight" in names:
            return found
    return None


def stored_names(layout: Names, names: list[str]) -> dict[str, str]:
    """Return the names of the layer's tensors: those of :func:`weights` -> stored."""
    own = {
        f"{getattr(layout, name)}.weight": f"{usual}.weight"
        for name, usual in _OWN.items()
    }
    found = {usual: stored for stored, usual in own.items() if stored in names}
    for stored in names:
        rest = stored.removeprefix(layout.layer)
        if rest != stored and stored not in own and rest not in COPIES:
            found[f"model.layers.0.{rest}"] = stored
    return found


_OWN: Final = {
    "embed_norm": "embed_norm", "hidden_norm": "hidden_norm", "join": "join",
    "norm": "model.norm",
}  # fmt: skip


def config(model: Model, target: Any, layout: Names) -> MtpConfig:
    """Return the config of the layer of a model with config ``target``."""
    given = {field.name for field in fields(target)}
    single: dict[str, Any] = {"layers": 1, "views": (FULL,)}
    if "dense_layers" in given:
        is_dense = target.layers - 1 in target.dense_layers
        single["dense_layers"] = (0,) if is_dense else ()
    if "recurrent" in given:
        single["recurrent"] = (False,)
    if "shared" in given:
        single["shared"] = (False,)
    layer = replace(target, **single)
    return MtpConfig(model, layer, target.layers, layout.hidden_first)


def weights(c: MtpConfig) -> Weights:
    """Return the weight tree, by the names of :func:`stored_names`."""
    tree, size = c.model.weights(c.layer), c.hidden_size
    offset = tree.norm.params["weight"].offset
    return Weights(
        None, tree.layers, tree.norm, None, None,
        groups.norm("embed_norm", size, offset=offset),
        groups.norm("hidden_norm", size, offset=offset),
        groups.linear("join", size, 2 * size),
    )  # fmt: skip


def state(c: MtpConfig) -> tuple[Paged, ...]:
    """Return the cache group of the layer."""
    (group,) = c.model.state(c.layer)
    assert isinstance(group, Paged), "the layer attends"
    return (group,)


def draft(
    ops: Ops, c: MtpConfig, w: Weights, message: Array, hidden: Hidden, state: State,
    *, is_tapped: bool,
) -> tuple[Array, Array, State]:  # fmt: skip
    """Compute a step, see :class:`~inl.models.draft_module.DraftModule`."""
    eps = c.layer.norm_eps
    step, state = begin(ops, message, state)
    given = ops.take_rows(hidden.source, hidden.rows)
    if is_tapped:
        given = ops.rms_norm(given, w.target_norm, eps=eps)
    carry: Any = c.model.embed(ops, c.layer, w, step)
    embedded = ops.rms_norm(carry.residual, w.embed_norm, eps=eps)
    normed = ops.rms_norm(given, w.hidden_norm, eps=eps)
    parts = (normed, embedded) if c.hidden_first else (embedded, normed)
    joined = ops.linear(join_columns(ops, *parts), w.join)
    carry = carry._replace(residual=joined, delta=ops.zeros_like(joined))
    carry, state = c.model.layer(ops, c.layer, w.layers[0], carry, step, state, index=0)
    logits = c.model.head(ops, c.layer, w, carry, step)
    out = ops.take_rows(carry.residual + carry.delta, step.samples)
    out = ops.rms_norm(out, w.norm, eps=eps)
    tokens, tables = ops.sample(logits, step, state.tables, sampler="greedy")
    return tokens, out, state._replace(tables=tables)


def shared(_c: MtpConfig) -> Mapping[str, str]:
    """Return what the layer has in common with its target."""
    return {"embed": "embed", "head": "head", "target_norm": "norm"}


MODULE = DraftModule(weights, state, draft, shared)
