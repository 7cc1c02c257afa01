"""Images in prompts, compared with transformers on tiny random checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from inl import EngineConfig, InferenceEngine  # noqa: E402
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


def expected_answer(made, prompt, images, count):
    """Greedy tokens of transformers for ids with a placeholder for each feature."""
    given = processor()(images=list(images), return_tensors="pt")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = made.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == PAD).int(), **given,
            max_new_tokens=count, min_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return found[0, len(prompt) :].tolist()


def prompt_of(images, seed=0):
    """Ids of text around images."""
    rng, ids = np.random.default_rng(seed), []
    for image in images:
        grid = processor()(images=[image])["image_grid_thw"][0]
        ids += rng.integers(3, 80, 5).tolist()
        ids += [START, *[PAD] * (int(grid.prod()) // 4), END]
    return ids + rng.integers(3, 80, 4).tolist()


PROMPTS = [
    [picture(70, 45, 1)],
    [picture(200, 310, 2), picture(60, 60, 3)],
    [picture(60, 60, 3), picture(33, 150, 4), picture(70, 45, 1)],
]


@pytest.fixture(scope="module")
def expected(model):
    prompts = [prompt_of(images, at) for at, images in enumerate(PROMPTS)]
    return [
        (ids, images, expected_answer(model[0], ids, images, 9))
        for ids, images in zip(prompts, PROMPTS, strict=True)
    ]


def opened(model, device, **config):
    return InferenceEngine(
        open_model(model[1]),
        config=EngineConfig(backend=device, dtype="float32", **config),
    )


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_answers_are_those_of_transformers(model, expected, device):
    with opened(model, device) as engine:
        for ids, images, answer in expected:
            found = engine.generate(ids, images=images, max_tokens=9, ignore_eos=True)
            assert list(found.token_ids) == answer


def test_answers_depend_on_the_images(model, expected):
    """Else the comparisons above would hold without them."""
    with opened(model, "reference") as engine:
        for ids, images, answer in expected:
            others = [picture(*each.size, seed=77) for each in images]
            found = engine.generate(ids, images=others, max_tokens=9, ignore_eos=True)
            assert list(found.token_ids) != answer


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"token_budget": 16},
        {"token_budget": 16, "prefix_cache": False, "max_batch": 2},
        {"speculation": "ngram"},
        {"decode_steps": 4},
        {"context": 208, "cache_bytes": 512 * 320},
    ],
    ids=str,
)
def test_schedules_give_the_same_tokens(model, expected, config):
    """Batches of images and text, chunks of prompts, preemption, drafts and repeats."""
    text = list(range(3, 40))
    with opened(model, "cpu", **config) as engine:
        alone = engine.generate(text, max_tokens=9, ignore_eos=True).token_ids
        batch = []
        for ids, images, _ in (*expected, *expected):
            batch.append(
                engine.submit(ids, images=images, max_tokens=9, ignore_eos=True)
            )
            batch.append(engine.submit(text, max_tokens=9, ignore_eos=True))
        found = [list(handle.result().token_ids) for handle in batch]
    assert found[1::2] == [list(alone)] * 6
    assert found[::2] == [answer for *_, answer in (*expected, *expected)]
