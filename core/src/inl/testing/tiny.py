"""Tiny models with random weights in memory, and runners for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from inl.backend.reference import ReferenceBackend, Rendezvous, ThreadCollectives
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray, wrap
from inl.errors import TokenizerNotFound
from inl.placement.sharding import check_shares
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import Loaded, LocalRunner
from inl.spec.selection import KernelSelection
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import check_tensors, plan_weights

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.device import Device
    from inl.protocol.runner import Limits
    from inl.spec.model import Model
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

Tensors = dict[str, NDArray[np.float32]]


@final
class MemoryCheckpoint(Checkpoint):
    """Checkpoint of a config and tensors in memory."""

    path = Path("memory")
    eos_token_ids = ()

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any] | HostArray]
    ) -> None:
        self.config = config
        self._tensors = {
            name: array if isinstance(array, HostArray) else wrap(array)
            for name, array in tensors.items()
        }

    def names(self) -> list[str]:
        return list(self._tensors)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        tensor = self.tensor(name)
        return tensor.dtype, tensor.shape

    def tensor(self, name: str) -> HostArray:
        if name not in self._tensors:
            raise self.missing(name)
        return self._tensors[name]

    def tokenizer(self) -> Tokenizer:
        raise TokenizerNotFound(f"{self.path}: has no tokenizer")

    @property
    def chat_template(self) -> ChatTemplate | None:
        return None

    def close(self) -> None:
        """Do nothing: no file is open."""


def tiny_llama(
    rng: np.random.Generator,
    *,
    layers: int = 2,
    hidden: int = 48,
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 8,
    inner: int = 96,
    vocab: int = 96,
    tied: bool = False,
    bias: bool = False,
) -> tuple[dict[str, Any], Tensors]:
    """Return a Llama config in the Hugging Face layout, and its tensors by name.

    Weights are scaled so that residual, attention and feed-forward have similar
    magnitudes and softmax is neither flat nor one-hot: an error in any term changes the
    logits.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": bias,
        "tie_word_embeddings": tied,
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": None}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for index in range(layers):
        at = f"model.layers.{index}."
        for name, rows in sizes.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            if bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows, 1)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, sizes["q"])
        if bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (hidden, 1)
        shapes[f"{at}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = None
        shapes[f"{at}post_attention_layernorm.weight"] = None
    tensors = {name: _random(rng, shape, hidden) for name, shape in shapes.items()}
    return config, tensors


def tiny_mixture(
    rng: np.random.Generator, *, experts: int = 4, chosen: int = 2, **sizes: Any
) -> tuple[dict[str, Any], Tensors]:
    """Return a Mixtral config in the Hugging Face layout, and its tensors by name.

    chosen: experts of each token. sizes: those of :func:`tiny_llama`, ``inner`` of one
    expert.
    """
    config, tensors = tiny_llama(rng, **sizes)
    config |= {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "num_local_experts": experts, "num_experts_per_tok": chosen,
    }  # fmt: skip
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        for name in ("gate", "up", "down"):
            del tensors[f"{at}mlp.{name}_proj.weight"]
        at += "block_sparse_moe."
        # Logits of a router are of several units, so that experts differ in weight.
        tensors[f"{at}gate.weight"] = _random(rng, (experts, hidden), hidden)
        for expert in range(experts):
            for name in ("w1", "w2", "w3"):
                shape = (hidden, inner) if name == "w2" else (inner, hidden)
                source = f"{at}experts.{expert}.{name}.weight"
                tensors[source] = _random(rng, shape, hidden)
    return config, tensors


def _random(
    rng: np.random.Generator, shape: tuple[int, int] | None, hidden: int
) -> NDArray[np.float32]:
    if shape is None:
        values = 1 + 0.3 * rng.standard_normal(hidden)
    elif shape[1] == 1:
        values = 0.5 * rng.standard_normal(shape[0])
    else:
        values = 1.4 * rng.standard_normal(shape) / shape[1] ** 0.5
    return np.asarray(values, np.float32)


class PlainInputs(NamedTuple):
    """Inputs of tokens for :func:`plain_logits`."""

    rows: Mapping[int, Any]
    """Index -> embedding [H] in place of the token."""
    turns: Any
    """[T, head_dim / 2] position by which each plane of a token's heads turns."""
    span: tuple[int, int]
    """Tokens, from the first to the end, that attend to each other."""
    features: Mapping[int, Any]
    """Layer -> [T, H], added after it."""
    windows: Mapping[int, int] = {}
    """Layer -> its window. Where there are any, only these layers have the span."""
    table_ids: Any = None
    """[T] ids of further rows of the table, which are added to the embeddings."""


def plain_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    ids: Any,
    stored: Callable[[Any], Any] = lambda x: x,
    inputs: PlainInputs | None = None,
) -> NDArray[np.float64]:
    """Return the logits of a tiny Llama or Mixtral, float64 [len(ids), V].

    There is no cache. stored: rounds keys and values [kv_heads, T, d] as a cache does.
    An oracle: independent of the ops and models of this package.
    """
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    shared = config["num_attention_heads"] // config["num_key_value_heads"]
    positions = np.arange(len(ids))
    turns = positions[:, None] if inputs is None else inputs.turns
    rotation = np.exp(
        1j * turns * config["rope_theta"] ** (-2 * np.arange(dim // 2) / dim)
    )
    causal = positions[:, None] >= positions
    spanned = causal.copy()
    if inputs is not None:
        first, end = inputs.span
        spanned[first:end, first:end] = True

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def heads(x: Any, name: str, *, rotate: bool) -> Any:
        y = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)
        y = y.reshape(len(ids), -1, dim).transpose(1, 0, 2)
        if not rotate:
            return y
        z = (y[..., : dim // 2] + 1j * y[..., dim // 2 :]) * rotation
        return np.concatenate([z.real, z.imag], -1)

    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for place, row in inputs.rows.items() if inputs is not None else ():
        x[place] = row
    if inputs is not None and inputs.table_ids is not None:
        x = x + w["model.embed_tokens.weight"][inputs.table_ids]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        y = norm(x, f"{at}input_layernorm")
        q = heads(y, f"{at}self_attn.q_proj", rotate=True)
        k = stored(heads(y, f"{at}self_attn.k_proj", rotate=True)).repeat(shared, 0)
        v = stored(heads(y, f"{at}self_attn.v_proj", rotate=False)).repeat(shared, 0)
        visible = spanned
        if inputs is not None and inputs.windows:
            window = inputs.windows.get(index)
            visible = (
                causal
                if window is None
                else spanned & (positions[:, None] - positions < window)
            )
        scores = np.where(visible, q @ k.swapaxes(1, 2), -np.inf)
        weights = np.exp(scores / dim**0.5)
        out = weights @ v / weights.sum(-1, keepdims=True)
        out = out.transpose(1, 0, 2).reshape(len(ids), -1)
        x = x + out @ w[f"{at}self_attn.o_proj.weight"].T
        x = x + w.get(f"{at}self_attn.o_proj.bias", 0.0)
        y = norm(x, f"{at}post_attention_layernorm")
        x = x + _plain_feed_forward(config, w, y, at)
        if inputs is not None:
            x = x + inputs.features.get(index, 0)
    table = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    result: NDArray[np.float64] = norm(x, "model.norm") @ w[f"{table}.weight"].T
    return result


def _plain_feed_forward(config: Mapping[str, Any], w: Any, y: Any, at: str) -> Any:
    """Return the feed-forward layer of rows [T, H]: of one expert after the other."""

    def gated(y: Any, gate: str, up: str, down: str) -> Any:
        gates = y @ w[f"{gate}.weight"].T
        inner = gates / (1 + np.exp(-gates)) * (y @ w[f"{up}.weight"].T)
        return inner @ w[f"{down}.weight"].T

    if "num_local_experts" not in config:
        return gated(y, *(f"{at}mlp.{name}_proj" for name in ("gate", "up", "down")))
    at += "block_sparse_moe."
    logits, count = y @ w[f"{at}gate.weight"].T, config["num_experts_per_tok"]
    least = np.sort(logits, axis=-1)[:, -count, None]
    # Of the chosen experts only, whose weights sum to 1.
    weights = np.where(logits >= least, np.exp(logits - logits.max(-1)[:, None]), 0)
    weights /= weights.sum(-1, keepdims=True)
    total = np.zeros_like(y)
    for expert in range(config["num_local_experts"]):
        rows = weights[:, expert] > 0
        names = (f"{at}experts.{expert}.{name}" for name in ("w1", "w3", "w2"))
        total[rows] += weights[rows, expert, None] * gated(y[rows], *names)
    return total


def local_runner(
    backend: Backend,
    model: Model,
    checkpoint: Checkpoint,
    limits: Limits,
    *,
    dtype: str = "float32",
    rank: int = 0,
    ranks: int = 1,
) -> LocalRunner:
    """Load the weights of one rank on ``backend`` and return its runner."""
    config = replace(model.config(checkpoint.config), dtype=dtype)
    selection = KernelSelection(
        tuple(backend.kernels()), device_name=str(backend.device)
    )
    stored = stored_specs(checkpoint)
    groups = plan_weights(model.weights(config), selection.kernels, stored, ranks=ranks)
    check_tensors(groups, stored, str(checkpoint.path))
    check_shares(groups, model.state(config), ranks)
    weights = load_weights(groups, checkpoint, backend, dtype, rank=rank)
    return LocalRunner(
        backend, Loaded(model, config, groups, weights, selection, ranks), limits
    )


def reference_ranks(
    device: Device,
    model: Model,
    checkpoint: Checkpoint,
    limits: Limits,
    *,
    ranks: int,
    dtype: str = "float32",
) -> RankRunner:
    """Return a tensor-parallel runner of NumPy backends, one thread each."""
    rendezvous = Rendezvous(ranks)

    def make(rank: int) -> LocalRunner:
        collectives = ThreadCollectives(ranks, rank, rendezvous)
        backend = ReferenceBackend(device, dtype=dtype, collectives=collectives)
        return local_runner(
            backend, model, checkpoint, limits, dtype=dtype, rank=rank, ranks=ranks
        )

    return RankRunner(make, ranks, abort=rendezvous.abort)
