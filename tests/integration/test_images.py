"""Images in prompts, compared with transformers on tiny random checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from inl import EngineConfig, InferenceEngine  # noqa: E402
from inl.errors import RequestError  # noqa: E402
from inl.executor.model_loader import open_model  # noqa: E402
from inl.executor.vision_encoder import VisionEncoder  # noqa: E402
from inl.images.decoding import decode  # noqa: E402

PAD, START, END = 90, 91, 92
"""Token ids of an image."""
TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 44, "num_heads": 2,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "window_size": 112, "out_hidden_size": 64, "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}  # fmt: skip
SIZES = ((70, 45), (200, 310), (28, 28), (1, 60))
"""Width and height of images."""


def picture(width, height, seed=0, mode="RGB"):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen25vl")
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=PAD,
        video_token_id=93, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    made = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
        for name, parameter in made.named_parameters():
            if "norm" in name or "ln_q" in name:
                parameter.copy_(1 + torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    processor(folder).save_pretrained(folder)
    return made.float(), folder


def processor(folder=None):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 50176})


@pytest.mark.parametrize("size", [*SIZES, (500, 400), (13, 900), (1023, 17)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
def test_patches_are_those_of_the_processor(model, size, mode):
    settings = open_model(model[1]).vision.settings
    image = picture(*size, mode=mode)
    theirs = processor()(images=[image], return_tensors="np")
    found = settings.patches(decode(image).pixels, "image")
    assert found.grid == tuple(theirs["image_grid_thw"][0, 1:])
    assert np.abs(found.values - theirs["pixel_values"]).max() <= 1e-6


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_features_are_those_of_transformers(model, device):
    made, folder = model
    config = EngineConfig(backend=device, dtype="float32")
    encoder = VisionEncoder.load(open_model(folder).vision, config)
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        given = processor()(images=[image], return_tensors="pt")
        with torch.no_grad():
            visual = made.model.visual(given["pixel_values"], given["image_grid_thw"])
        expected = visual.pooler_output.numpy()
        found = encoder.encode(decode(image)).features
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    encoder.close()
