"""GPT-OSS with experts in MXFP4, against transformers' own decoding of the blocks."""

from __future__ import annotations

import importlib
import json

import pytest

from inl.device import Device
from inl.errors import CheckpointError
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
families = importlib.import_module("families")


def decoded(blocks, scales):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with random blocks, its tokens and what transformers computes."""
    path = tmp_path_factory.mktemp("mxfp4")
    one = families.make("gpt-oss", path, hidden_size=64, intermediate_size=96)
    model = transformers.GptOssForCausalLM.from_pretrained(
        path, attn_implementation="eager"
    ).eval()
    source = torch.Generator().manual_seed(4)
    packed = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, size, rows = weight.shape
            shape = count, rows, size // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=source)
            scales = torch.randint(122, 126, shape, generator=source)
            packed[name] = blocks.to(torch.uint8), scales.to(torch.uint8)
            with torch.no_grad():
                weight.copy_(decoded(*packed[name]))
    tensors = safetensors.load_file(path / "model.safetensors")
    for name, (blocks, scales) in packed.items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    assert len(packed) == 2 * families.LAYERS
    safetensors.save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        logits = model(torch.tensor([one.ids])).logits[0].numpy()
    return families.Made(path, one.ids, logits)


def backend(name):
    if name == "cpu":
        from inl_cpu.backend import open_cpu

        return open_cpu(Device("cpu:0"))
    return families.reference("float64")


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_logits_are_transformers(name, made):
    language = open_model(made.path)
    assert language.checkpoint.notes == ("MXFP4: 8 matrices repacked as mxfp4",)
    dtype = "float32" if name == "cpu" else "float64"
    runner = families.load(language, backend(name), dtype)
    for cuts in [(), (9, *range(10, families.TOKENS))]:
        found = families.logits(runner, made.ids, cuts)
        assert families.distance(found, made.logits) < 1e-4


DAMAGE = {
    "short blocks": ("blocks", lambda x: x[..., :15], ["_blocks", "15]", ", 16]"]),
    "other scales": ("scales", lambda x: x[:, :-1], ["_scales", "[5, 191, 2]"]),
    "floats": ("scales", lambda x: x.float(), ["_scales", "float32", "uint8"]),
    "NaN": ("scales", lambda x: x | 255, ["_scales", "NaN", "0 to 254"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_blocks_are_refused_by_name(case, made, tmp_path):
    part, change, words = DAMAGE[case]
    tensors = safetensors.load_file(made.path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.gate_up_proj_{part}"
    tensors[name] = change(tensors[name]).contiguous()
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        families.load(open_model(tmp_path), backend("reference"), "float64")
    for word in [name.rpartition("_")[0], "MXFP4", *words]:
        assert word in str(caught.value)
