"""GLM-5 (Zhipu, 2026): sparse attention, whose choices several layers may share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import deepseek_v32, sparse_mla
from inl.models.config import flag, whole

DEFAULTS: Final = {
    **deepseek_v32.DEFAULTS, "num_key_value_heads": 64,
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
    "index_n_heads": 32,
}  # fmt: skip
"""Defaults of config fields that differ from those of DeepSeek-V3.2."""
KINDS: Final = {"full": False, "shared": True}
"""Accepted entries of ``indexer_types``, and whether the layer has no indexer."""
LETTERS: Final = {"F": "full", "S": "shared"}
"""Those of ``index_topk_pattern``."""


def config(hf: Mapping[str, Any]) -> sparse_mla.SparseConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    base = sparse_mla.config(hf, DEFAULTS)
    interleaved = flag(hf, "indexer_rope_interleave", True)
    return replace(base, shared=_shared(hf, base.layers), index_interleaved=interleaved)


def _shared(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    field, types = "indexer_types", hf.get("indexer_types")
    pattern = hf.get("index_topk_pattern")
    every = whole(hf, "index_topk_freq", 1, least=0)
    offset = whole(hf, "index_skip_topk_offset", 2, least=0)
    if types is None and pattern is not None:
        field, types = "index_topk_pattern", pattern
        if isinstance(pattern, str):
            types = [LETTERS.get(letter) for letter in pattern]
    elif types is None:
        starts = (max(index - offset + 1, 0) % max(every, 1) for index in range(layers))
        types = ["shared" if start else "full" for start in starts]
    known = isinstance(types, (list, tuple)) and len(types) == layers
    if not known or any(kind not in [*KINDS] for kind in types) or KINDS[types[0]]:
        raise CheckpointError(
            f"config field {field!r}: found {show(hf.get(field))}, expected a list of "
            f"{layers}, {' or '.join(KINDS)} for each layer, the first of them full"
        )
    return tuple(KINDS[kind] for kind in types)


MODEL = replace(sparse_mla.MODEL, config=config)
