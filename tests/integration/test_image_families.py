"""Pixtral and SmolVLM: images whose tokens are in parts, compared with transformers."""

from __future__ import annotations

import json
from shutil import copyfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

from tokenizers import AddedToken  # noqa: E402
from transformers.models.pixtral.image_processing_pil_pixtral import (  # noqa: E402
    PixtralImageProcessorPil,
)
from transformers.models.smolvlm.image_processing_pil_smolvlm import (  # noqa: E402
    SmolVLMImageProcessorPil,
)
from transformers.models.smolvlm.processing_smolvlm import (  # noqa: E402
    get_image_prompt_string,
)

from byte_tokens import byte_rules  # noqa: E402
from image_models import Made, fill, picture  # noqa: E402
from inl import EngineConfig, InferenceEngine  # noqa: E402
from inl.errors import RequestError  # noqa: E402
from inl.executor.encoder_executor import load_encoder  # noqa: E402
from inl.executor.model_loader import open_model  # noqa: E402
from inl.executor.vision_encoder import VisionEncoder  # noqa: E402
from inl.images.decoding import decode  # noqa: E402
from inl.plugin import make_backend  # noqa: E402

EOS, IMAGE, BREAK, END, AROUND, WHOLE = range(256, 262)
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
SPECIAL = [
    "<|endoftext|>", "<image>", "[IMG_BREAK]", "[IMG_END]",
    "<fake_token_around_image>", "<global-img>", *TILES,
]  # fmt: skip
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "head_dim": 16, "rms_norm_eps": 1e-5,
    "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS,
    "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 2, "patch_size": 14,
}  # fmt: skip


def _mistral3():
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", "sliding_window": None, **TEXT},
        vision_config={"model_type": "pixtral", "image_size": 140, **VISION},
        image_token_index=IMAGE, tie_word_embeddings=False,
    )  # fmt: skip
    processor = PixtralImageProcessorPil(
        size={"longest_edge": 140}, patch_size={"height": 28, "width": 28}
    )
    return transformers.Mistral3ForConditionalGeneration(config), processor


def _smolvlm():
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"image_size": 56, **VISION},
        image_token_id=IMAGE, scale_factor=2, tie_word_embeddings=False,
        pad_token_id=EOS,
    )  # fmt: skip
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 150}, max_image_size={"longest_edge": 56}
    )
    return transformers.SmolVLMForConditionalGeneration(config), processor


KINDS = {"mistral3": _mistral3, "smolvlm": _smolvlm}
SIZES = [(70, 45), (200, 310), (28, 28), (1, 60), (500, 400), (90, 13)]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    made, processor = KINDS[request.param]()
    fill(made)
    made.save_pretrained(folder)
    processor.save_pretrained(folder)
    rules = byte_rules()
    rules.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    rules.save(str(folder / "tokenizer.json"))
    fields = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return Made(made, folder, processor)


def processed(model, image):
    """What the processor of transformers gives the model, and an image's text."""
    kind = model.model.config.model_type
    if kind == "mistral3":
        given = dict(model.processor(images=[image], return_tensors="pt"))
        rows, columns = (int(side) // 28 for side in given["image_sizes"][0])
        lines = ["<image>" * columns] * rows
        return given, "[IMG_BREAK]".join(lines) + "[IMG_END]"
    given = dict(
        model.processor(images=[image], return_tensors="pt", return_row_col_info=True)
    )
    (((rows,),), ((columns,),)) = given.pop("rows"), given.pop("cols")
    text = get_image_prompt_string(
        rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    return given, text


def test_a_processor_without_fields_has_the_defaults(model, tmp_path):
    for file in model.folder.iterdir():
        if file.name != "preprocessor_config.json":
            copyfile(file, tmp_path / file.name)
    settings = open_model(tmp_path).vision.settings
    grid = settings.grid_of(2000, 1500, "image")
    is_pixtral = model.model.config.model_type == "mistral3"
    # 1024 x 768 in squares of 28 pixels; 224 x 168 in tiles of 56.
    assert grid == ((74, 56) if is_pixtral else (16, 12))


def patches_of(model, given):
    """The patches of transformers' pixels, row by row of features."""
    pixels = np.asarray(given["pixel_values"])
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    count, channels, height, width = pixels.shape
    x = pixels.reshape(count, channels, height // 28, 2, 14, width // 28, 2, 14)
    return x.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * 14 * 14)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_patches_and_tokens_are_those_of_the_processor(model, size, mode):
    settings = open_model(model.folder).vision.settings
    image = picture(*size, mode=mode)
    given, text = processed(model, image)
    found = settings.patches(decode(image).pixels, "image")
    expected = patches_of(model, given)
    assert found.values.shape == expected.shape
    assert np.abs(found.values - expected).max() <= 1e-6
    pieces = settings.pieces(found.grid)
    assert text == "".join(
        "<image>" * piece if isinstance(piece, int) else piece for piece in pieces
    )


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_features_are_those_of_transformers(model, device):
    vision, config = open_model(model.folder).vision, EngineConfig(dtype="float32")
    executor = load_encoder(vision, make_backend(device), config)
    encoder = VisionEncoder(vision, executor)
    # transformers cannot split the features of an image of one.
    for seed, size in enumerate(SIZES[:2]):
        image = picture(*size, seed)
        given, _ = processed(model, image)
        with torch.no_grad():
            visual = model.model.model.get_image_features(**given, return_dict=True)
        expected = torch.cat(list(visual.pooler_output)).numpy()
        features = encoder.encode(decode(image)).features
        assert features.shape == expected.shape
        error = np.abs(features - expected).max()
        assert error <= 1e-4 * np.abs(expected).max()
    encoder.close()


def expected_answer(model, ids, image, count):
    given, _ = processed(model, image)
    with torch.no_grad():
        found = model.model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=int), **given,
            max_new_tokens=count, min_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return found[0, len(ids) :].tolist()


def test_answers_are_those_of_transformers(model):
    with InferenceEngine(
        open_model(model.folder),
        config=EngineConfig(backend="reference", dtype="float32", token_budget=32),
    ) as engine:
        assert engine._encoder.images._encoder is None  # texts do not pay for it
        tokenizer = engine._encoder.tokenizer("test")
        for seed, size in enumerate([(70, 45), (200, 310)]):
            image = picture(*size, seed)
            text = "See " + processed(model, image)[1] + " What?"
            ids = tokenizer.encode(text, add_special=False)
            answer = expected_answer(model, ids, image, 6)
            options = {"max_tokens": 6, "ignore_eos": True}
            parts = [
                {"type": "text", "text": "See "},
                {"type": "image", "image": image},
                {"type": "text", "text": " What?"},
            ]
            messages = [{"role": "user", "content": parts}]
            assert engine.chat_ids(messages) == ids
            for prompt, images in ((ids, [image]), (messages, None)):
                found = engine.generate(prompt, images=images, **options)
                assert list(found.token_ids) == answer
            other = engine.generate(ids, images=[picture(*size, 9)], **options)
            assert list(other.token_ids) != answer
        with pytest.raises(RequestError, match="without images; give the images too"):
            engine.generate(ids)
