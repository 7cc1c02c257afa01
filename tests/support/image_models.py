"""Tiny random models of images and text, in folders as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)

from byte_tokens import byte_rules
from depth import seed_of
from inl.images.decoding import ImageDecoder

EOS, PAD, START, END, VIDEO, ROLE, ROLE_END = range(256, 263)
"""Token ids after those of bytes: of images and of turns."""
SPECIAL = {
    "<|endoftext|>": EOS, "<|image_pad|>": PAD, "<|vision_start|>": START,
    "<|vision_end|>": END, "<|video_pad|>": VIDEO, "<|im_start|>": ROLE,
    "<|im_end|>": ROLE_END,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS,
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 44, "num_heads": 2,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "window_size": 112, "out_hidden_size": 64, "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}  # fmt: skip


def picture(width, height, seed=0, mode="RGB"):
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


MODES = ("RGB", "RGBA", "L", "LA", "P", "CMYK", "1", "I;16")


def random_pictures(count, name):
    """Images of up to 4,000 x 3,000 pixels and every mode, by a seed of this name."""
    rng = np.random.default_rng(seed_of(name))
    for at in range(count):
        width, height = (round(most ** rng.uniform(0, 1)) for most in (4000, 3000))
        width, height = (width, height) if rng.integers(4) else (height, width)
        mode = MODES[at % len(MODES)]
        if mode == "I;16":
            yield Image.fromarray(rng.integers(0, 1 << 16, (height, width), np.uint16))
            continue
        image = picture(width, height, int(rng.integers(1 << 30)))
        # Noise hides where pixels come from: some images are smooth.
        if rng.integers(2):
            small = image.resize((max(width // 9, 1), max(height // 9, 1)))
            image = small.resize((width, height))
        yield image.convert(mode)


VISION_3 = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 44, "num_heads": 2,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": 64, "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
ROPE_3 = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}  # fmt: skip
TEXT_3 = {
    **{name: TEXT[name] for name in TEXT if not name.startswith("rope")},
    "rope_parameters": ROPE_3, "head_dim": 16,
}  # fmt: skip
IDS = {
    "image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END, "tie_word_embeddings": False,
}  # fmt: skip


def encoded(encoder, image):
    """The features of an image of Pillow."""
    found = ImageDecoder().decode(image)
    patches = encoder.vision.settings.patches(found.pixels, "image")
    return encoder.encode(patches, found.digest)


def encoded_together(encoder, images):
    """The features of images of one program, computed part by part."""
    pairs = []
    for image in images:
        found = ImageDecoder().decode(image)
        patches = encoder.vision.settings.patches(found.pixels, "image")
        pairs.append((patches, found.digest))
    batch = encoder.begin(pairs)
    while not batch.encoding.is_done:
        batch.encoding.advance(1)
    assert batch.encoding.parts > 3
    return batch.results()


class Made(NamedTuple):
    """A model of transformers, its folder and its processor of images."""

    model: Any
    folder: Path
    processor: Any


def _qwen25():
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=VISION, **IDS
    )
    made = transformers.Qwen2_5_VLForConditionalGeneration(config)
    size = {"shortest_edge": 3136, "longest_edge": 50176}
    return made, Qwen2VLImageProcessorPil(size=size)


def _qwen3():
    config = transformers.Qwen3VLConfig(
        text_config=TEXT_3, vision_config=VISION_3, **IDS
    )
    made = transformers.Qwen3VLForConditionalGeneration(config)
    size = {"shortest_edge": 4096, "longest_edge": 65536}
    half = [0.5, 0.5, 0.5]
    return made, Qwen2VLImageProcessorPil(
        size=size, patch_size=16, image_mean=half, image_std=half
    )


def _qwen35():
    vision = {
        name: VISION_3[name] for name in VISION_3 if name != "deepstack_visual_indexes"
    }
    rope = {
        **ROPE_3, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
    }  # fmt: skip
    text = {
        **TEXT_3, "rope_parameters": rope, "full_attention_interval": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **IDS)
    made = transformers.Qwen3_5ForConditionalGeneration(config)
    return made, _qwen3()[1]


KINDS = {"qwen2_5_vl": _qwen25, "qwen3_vl": _qwen3, "qwen3_5": _qwen35}
"""Models by ``model_type``; an image has up to 64 features."""


def fill(made):
    """Give a model random weights in float32."""
    made.eval().float()
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            draw = torch.randn(parameter.shape, generator=numbers)
            is_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.copy_(1 + 0.1 * draw if is_norm else 0.15 * draw)


def tiny_model(kind, folder):
    """Write a model with random weights."""
    made, processor = KINDS[kind]()
    fill(made)
    made.save_pretrained(folder)
    processor.save_pretrained(folder)
    rules = byte_rules()
    rules.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    assert {text: rules.token_to_id(text) for text in SPECIAL} == SPECIAL
    rules.save(str(folder / "tokenizer.json"))
    fields = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return Made(made, folder, processor)
