"""DeepSeek-V3 as it is published: FP8 in blocks, and layers for more tokens."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from inl.device import Device
from inl.errors import CheckpointError
from inl.executor.model_loader import open_model
from inl.models.registry import find_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

families = importlib.import_module("families")
quantized = importlib.import_module("quantized_models")
BLOCK = 16


def test_blocks_of_fp8_and_other_layers(tmp_path):
    from inl_cpu.backend import open_cpu

    one = families.make("deepseek3", tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    packed = {}
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        scale, each = quantized.per_block(weight, BLOCK)
        stored = (weight / each).to(torch.float8_e4m3fn)
        tensors[name] = stored.float() * each
        packed |= {name: stored, f"{name}_scale_inv": scale}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor([one.ids])).logits[0].numpy()
    extra = f"model.layers.{families.LAYERS}.eh_proj.weight"
    tensors |= {**packed, extra: torch.zeros(4, 4)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    config |= {"num_nextn_predict_layers": 1, "scoring_func": "sigmoid"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(packed) > 100
    runner = families.load(open_model(tmp_path), open_cpu(Device("cpu:0")), "float32")
    found = families.logits(runner, one.ids, (9, *range(10, families.TOKENS)))
    assert families.distance(found, expected) < 1e-4


def test_the_cache_holds_latents(tmp_path):
    language = open_model(families.make("deepseek3", tmp_path).path)
    (cache,) = language.model.state(language.config)
    sizes = families.MLA["kv_lora_rank"] + families.MLA["qk_rope_head_dim"]
    assert (cache.kv_heads, cache.head_dim) == (1, sizes)


REFUSED = {
    "n_group": {"n_group": 5},
    "topk_method": {"topk_method": "greedy"},
    "moe_layer_freq": {"moe_layer_freq": 2},
    "num_key_value_heads": {"num_key_value_heads": 2},
    "head_dim": {"head_dim": 64},
}


@pytest.mark.parametrize("field", REFUSED)
def test_other_routings_and_heads_are_refused(field):
    config = {**families.SIZES, **families.MLA, "model_type": "deepseek_v3"}
    config |= {"n_group": 3, "topk_group": 2, "num_key_value_heads": 6}
    assert find_model(config, Path("here")).config(config).latent
    with pytest.raises(CheckpointError, match=f"config field '{field}'"):
        find_model(config, Path("here")).config(config | REFUSED[field])
