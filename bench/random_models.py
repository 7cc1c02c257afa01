"""Models of known shapes with random weights, for benchmarks of any device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from inl.checkpoints.blocks.encode import encode
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray, widen
from inl.errors import TokenizerNotFound
from inl.executor.model_loader import LanguageModel
from inl.models import bamba, deepseek_v3, deepseek_v32, llama, qwen3_moe
from inl.spec.op import Spec
from inl.spec.tree import leaves
from inl.weights.quantize.report import KINDS
from inl.weights.sources import stored_tensors

SHAPES = {
    "smollm2": (49152, 576, 1536, 30, 9, 3, 64, True),
    "8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
    "tiny": (512, 64, 128, 2, 4, 2, 16, True),
    "moe": (151936, 2048, 6144, 48, 32, 4, 128, False),
    "sparse": (32000, 7168, 2048, 4, 128, 128, 64, False),
    "mtp": (16000, 1024, 4096, 24, 16, 4, 64, False),
    "mamba2": (32000, 1024, 2048, 24, 16, 4, 64, True),
}
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip

MIXTURES = {
    "moe": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}  # fmt: skip
"""Further fields of shapes that are mixtures of experts, here Qwen3-30B-A3B."""

RECURRENT = {
    "mamba2": {
        "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
        "attn_layer_indices": [1],
    },
}  # fmt: skip
"""Further fields of shapes with layers of Mamba-2, here of all layers but one."""


LATENT = {
    "sparse": {
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 64,
        "n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 64,
        "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
    },
}  # fmt: skip
"""Further fields of shapes with latent attention, here of layers of DeepSeek-V3.2
without experts."""


class Random(Checkpoint):
    """Tensors of the model's shapes, all views of one array of random numbers."""

    path = Path("random")
    eos_token_ids = ()
    chat_template = None
    wide_groups = False
    """Whether 128 codes of 4 bits share a scale, as in most files of AWQ and GPTQ."""

    def __init__(self, config: dict[str, Any], specs: dict[str, Spec]) -> None:
        self.config, self.specs = config, specs
        rng = np.random.default_rng(0)
        numbers = rng.standard_normal(1 << 22).astype(np.float32) * 0.03
        self._bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        self._made: dict[tuple[str, tuple[int, ...]], HostArray] = {}

    def names(self) -> list[str]:
        return list(self.specs)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.specs[name].dtype, self.specs[name].shape

    def tensor(self, name: str) -> HostArray:
        dtype, shape = self.spec(name)
        if (dtype, shape) not in self._made:
            data = np.resize(self._bits, shape)
            if len(shape) == 1:
                data = np.full(shape, 0x3F80, np.uint16)
            data.setflags(write=False)
            made = HostArray(data, "bfloat16", shape)
            if dtype != "bfloat16":
                made = encode(widen(made), dtype)
            if dtype == "q4_1" and self.wide_groups:
                heads = made.data.reshape(shape[0], -1, 20)[:, :, :4]
                heads[:] = np.repeat(heads[:, ::4], 4, 1)
            self._made[dtype, shape] = made
        return self._made[dtype, shape]

    def tokenizer(self) -> Any:
        raise TokenizerNotFound("random weights have none")

    def close(self) -> None:
        self._made = {}


def random_language(
    name: str, context: int = 8192, layers: int = 0, quantize: str = "",
    *, dense: bool = False,
) -> LanguageModel:  # fmt: skip
    """Return a shape's model in bfloat16; layers: fewer than the shape has.

    quantize: kind of the matrices of its layers, as of ``EngineConfig.quantize``.
    dense: whether sparse attention reads all tokens, as that of DeepSeek-V3 does.
    """
    hf = dict(zip(FIELDS, SHAPES[name], strict=True))
    hf["max_position_embeddings"] = context
    hf["num_hidden_layers"] = layers or hf["num_hidden_layers"]
    model = qwen3_moe.MODEL if name in MIXTURES else llama.MODEL
    model = bamba.MODEL if name in RECURRENT else model
    if name in LATENT:
        model = deepseek_v3.MODEL if dense else deepseek_v32.MODEL
    hf |= MIXTURES.get(name, {}) | RECURRENT.get(name, {}) | LATENT.get(name, {})
    config = replace(model.config(hf), dtype="bfloat16")

    def dtype(source: str, axes: int) -> str:
        matrix = axes == 2 and ".layers." in source and "mlp.gate." not in source
        return KINDS[quantize] if quantize and matrix else "bfloat16"

    specs = {
        source: Spec(shape, dtype(source, len(shape)))
        for group in leaves(model.weights(config))
        for param in group.params.values()
        for source, shape in stored_tensors(param).items()
    }
    return LanguageModel(model, config, Random(hf, specs))
