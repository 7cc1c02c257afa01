"""Models of images and text answer as transformers where there is only text."""

from __future__ import annotations

import importlib

import pytest

from depth import mostly_full
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
families = importlib.import_module("families")

BOUND, TOKENS, IMAGE = 1e-4, 30, 5
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TOWERS = {
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text",
        SPARSE | {"head_dim": 12, "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        }},
    ),
    "internvl": ("InternVLForConditionalGeneration", "qwen2", {}),
    "fuyu": ("FuyuForCausalLM", "persimmon", {}),
    "got_ocr2": ("GotOcr2ForConditionalGeneration", "qwen2", {}),
    "llava": ("LlavaForConditionalGeneration", "mistral", {}),
    "llava_next": ("LlavaNextForConditionalGeneration", "llama", {}),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", "qwen2", {}),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", "lfm2", {}),
    "ovis2": ("Ovis2ForConditionalGeneration", "qwen2", {}),
    "vipllava": ("VipLlavaForConditionalGeneration", "llama", {}),
}  # fmt: skip
"""``model_type``: class, that of the language model, fields of that."""


def made(kind, path):
    name, text_kind, fields = TOWERS[kind]
    text = {"model_type": text_kind, **families.SIZES, **fields}
    config = transformers.CONFIG_MAPPING[kind](
        text_config=text, vision_config=dict(VISION), image_token_id=IMAGE
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, weight in families.tensors(model):
            weight.copy_(families._random(key, weight.shape, source, centered=False))
    model.save_pretrained(path)
    ids = torch.randint(IMAGE + 1, families.VOCAB, (1, TOKENS), generator=source)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].numpy()
    return families.Made(path, ids[0].tolist(), logits)


@pytest.mark.parametrize("kind", mostly_full(list(TOWERS), 1))
def test_text_alone_has_the_logits_of_transformers(kind, tmp_path):
    one = made(kind, tmp_path)
    runner = families.load(open_model(one.path), families.reference(), "float64")
    for cuts in ((), (7, 8, 20)):
        found = families.logits(runner, one.ids, cuts)
        assert families.distance(found, one.logits) < BOUND
    other = families.logits(runner, one.ids[::-1])
    assert families.distance(other, one.logits) > 10 * BOUND
