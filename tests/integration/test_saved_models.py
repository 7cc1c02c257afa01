"""Models that transformers has saved: with images, without a head, tied twice."""

from __future__ import annotations

import importlib
import json
import re
from functools import partial

import pytest

from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
families = importlib.import_module("families")

BOUND = 1e-4


def filled(model, path, seed=3):
    """Give a model random weights, save it, and return tokens and logits."""
    source = torch.Generator().manual_seed(seed)
    centered = "Gemma" if "Gemma" in type(model).__name__ else ""
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(families._random(key, weight.shape, source, centered=centered))
        ids = torch.randint(3, families.VOCAB, (1, families.TOKENS), generator=source)
        logits = model.eval()(ids).logits[0].numpy()
    model.save_pretrained(path)
    return ids[0].tolist(), logits


def error(path, ids, logits):
    runner = families.load(open_model(path), families.reference(), "float64")
    return families.distance(families.logits(runner, ids), logits)


@pytest.fixture
def llama(tmp_path):
    config = transformers.LlamaConfig(**families.SIZES)
    model = transformers.LlamaForCausalLM(config)
    return tmp_path, model, *filled(model, tmp_path)


def rewritten(path, names):
    """Rename the tensors of a saved model."""
    tensors = safetensors.load_file(path / "model.safetensors")
    renamed = {names(name): tensor for name, tensor in tensors.items()}
    safetensors.save_file(renamed, path / "model.safetensors", {"format": "pt"})


def test_the_text_model_of_gemma3(tmp_path):
    text = families.SIZES | families.GEMMA | {"layer_types": families.KINDS}
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 4, "patch_size": 2,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config)
    ids, logits = filled(model, tmp_path)
    assert error(tmp_path, ids, logits) < BOUND
    names = safetensors.load_file(tmp_path / "model.safetensors")
    assert any("vision_tower" in name for name in names)
    old = {"model.language_model.": "language_model.model.", "model.": ""}

    def published(name):
        for prefix, other in old.items():
            if name.startswith(prefix):
                return other + name.removeprefix(prefix)
        return name

    rewritten(tmp_path, published)
    assert error(tmp_path, ids, logits) < BOUND


def fused(tensors):
    """Experts of a layer in one tensor, as Qwen3.5-MoE's are published."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        stem, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            found[name] = tensor
            continue
        number, kind = rest.split(".")[:2]
        experts.setdefault((stem, kind), {})[int(number)] = tensor
    for stem in {stem for stem, _ in experts}:
        gate, up, down = (
            torch.stack([each for _, each in sorted(experts[stem, kind].items())])
            for kind in ("gate_proj", "up_proj", "down_proj")
        )
        found[f"{stem}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        found[f"{stem}.experts.down_proj"] = down
    return found


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_the_text_model_of_qwen3_5(family, tmp_path, caplog):
    kind, fields = families.FAMILIES[family]
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 2,
        "patch_size": 2, "out_hidden_size": 48, "num_position_embeddings": 16,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config=families.SIZES | fields, vision_config=vision
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    ids, logits = filled(model, tmp_path)
    assert error(tmp_path, ids, logits) < BOUND
    # As published: experts in one tensor, a layer that drafts, and fields of others.
    path = tmp_path / "model.safetensors"
    tensors = fused(safetensors.load_file(path)) | {"mtp.fc.weight": torch.ones(2, 2)}
    assert any("model.visual." in name for name in tensors)
    assert any("experts.gate_up_proj" in name for name in tensors) == ("moe" in family)
    safetensors.save_file(tensors, path, {"format": "pt"})
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["text_config"] |= {
        "full_attention_interval": 4, "attn_output_gate": True, "mtp_num_hidden_layers":
        1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert error(tmp_path, ids, logits) < BOUND
    assert not [each for each in caplog.records if each.name.startswith("inl")]


def test_the_text_model_of_llama4(tmp_path):
    text = families.SIZES | families.FAMILIES["llama4"][1]
    vision = {
        "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 4, "patch_size": 2,
        "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8,
    }  # fmt: skip
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    model = transformers.Llama4ForConditionalGeneration(config)
    ids, logits = filled(model, tmp_path)
    names = safetensors.load_file(tmp_path / "model.safetensors")
    assert any("vision_model" in name for name in names)
    assert "language_model.model.layers.1.feed_forward.experts.down_proj" in names
    assert error(tmp_path, ids, logits) < BOUND


VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 4, "patch_size": 2,
}  # fmt: skip
QWEN_VISION = {
    "hidden_size": 8, "embed_dim": 8, "intermediate_size": 8, "depth": 1,
    "num_heads": 2, "patch_size": 2, "out_hidden_size": 48,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
SECTIONS = families.rope(mrope_section=[2, 1, 1])
INTERLEAVED = families.rope(mrope_section=[2, 1, 1], mrope_interleaved=True)
OF_IMAGES = {
    "Mistral3": ({"model_type": "mistral", "sliding_window": None}, VISION),
    "Llava": ({"model_type": "llama"}, VISION),
    "LlavaNext": ({"model_type": "qwen2"}, VISION),
    "Qwen2VL": (SECTIONS, QWEN_VISION),
    "Qwen2_5_VL": (SECTIONS, QWEN_VISION),
    "Qwen3VL": (INTERLEAVED | {"head_dim": 8}, QWEN_VISION),
}


@pytest.mark.parametrize("kind", OF_IMAGES)
def test_the_text_model_of_a_model_of_images(kind, tmp_path):
    fields, vision = OF_IMAGES[kind]
    config = getattr(transformers, f"{kind}Config")(
        text_config=families.SIZES | fields, vision_config=vision
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    ids, logits = filled(model, tmp_path)
    names = safetensors.load_file(tmp_path / "model.safetensors")
    assert any("vis" in name for name in names)
    assert error(tmp_path, ids, logits) < BOUND
    if kind.startswith("Qwen"):
        flat(tmp_path)
    for prefix in PLACES[kind]:
        rewritten(tmp_path, partial(placed, prefix=prefix))
        assert error(tmp_path, ids, logits) < BOUND


PLAIN, NESTED, INSIDE = "model.", "model.language_model.", "language_model.model."
PLACES = {
    **dict.fromkeys(("Mistral3", "Llava", "LlavaNext"), (NESTED, INSIDE)),
    **dict.fromkeys(("Qwen2VL", "Qwen2_5_VL"), (PLAIN, NESTED)),
    "Qwen3VL": (NESTED,),
}
"""Prefixes of the language model's tensors in published models."""
TEXT = re.compile(rf"({NESTED}|{INSIDE}|{PLAIN})(?=layers|embed_tokens|norm)")


def placed(name, prefix):
    """A tensor's name with another prefix of the language model."""
    if name.endswith("lm_head.weight"):
        return ("language_model." if prefix == INSIDE else "") + "lm_head.weight"
    return TEXT.sub(prefix, name)


def flat(path):
    """Write the config as it was before ``text_config``."""
    saved = json.loads((path / "config.json").read_text())
    text = saved.pop("text_config")
    parameters = text.pop("rope_parameters")
    section = {"mrope_section": parameters["mrope_section"]}
    saved = text | saved | {"rope_theta": parameters["rope_theta"]}
    saved["rope_scaling"] = {"type": "mrope", **section}
    (path / "config.json").write_text(json.dumps(saved))


@pytest.mark.parametrize("family", ["llama4", "qwen3", "cohere2", "deepseek3"])
def test_models_without_a_head_have_no_prefix(family, tmp_path):
    one = families.make(family, tmp_path, tie_word_embeddings=True)
    rewritten(tmp_path, lambda name: name.removeprefix("model."))
    assert error(tmp_path, one.ids, one.logits) < BOUND


def test_names_without_a_prefix(llama):
    path, _, ids, logits = llama
    rewritten(path, lambda name: name.removeprefix("model."))
    assert error(path, ids, logits) < BOUND


def test_a_tied_model_with_another_head_uses_the_head(llama):
    path, _, ids, _ = llama
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": True})
    )
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    assert error(path, ids, logits) < BOUND


def test_rope_scaling_beside_rope_parameters(llama):
    path, _, ids, before = llama
    config = json.loads((path / "config.json").read_text())
    assert "rope_parameters" in config
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    (path / "config.json").write_text(json.dumps(config | {"rope_scaling": yarn}))
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    assert error(path, ids, logits) < BOUND
    assert families.distance(before, logits) > 10 * BOUND
