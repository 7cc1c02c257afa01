"""Mistral 3, SmolVLM and Gemma 3: images in prompts, compared with transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from shutil import copyfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

from tokenizers import AddedToken  # noqa: E402
from transformers.models.gemma3.image_processing_pil_gemma3 import (  # noqa: E402
    Gemma3ImageProcessorPil,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import (  # noqa: E402
    Gemma4ImageProcessorPil,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (  # noqa: E402
    PaddleOCRVLImageProcessorPil,
)
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
from depth import scaled  # noqa: E402
from image_models import (  # noqa: E402
    Made,
    encoded,
    encoded_together,
    fill,
    picture,
    random_pictures,
)
from inl import EngineConfig, InferenceEngine  # noqa: E402
from inl.errors import RequestError  # noqa: E402
from inl.executor.encoder_executor import load_encoder  # noqa: E402
from inl.executor.model_loader import open_model  # noqa: E402
from inl.executor.vision_encoder import VisionEncoder  # noqa: E402
from inl.images.decoding import ImageDecoder  # noqa: E402
from inl.plugin import make_backend  # noqa: E402
from llama4_processor import Llama4Processor  # noqa: E402
from projector_files import gguf_tokens, write_projector, write_text  # noqa: E402

EOS, IMAGE, BREAK, END, AROUND, WHOLE = range(256, 262)
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
SPECIAL = [
    "<|endoftext|>", "<image>", "[IMG_BREAK]", "[IMG_END]",
    "<fake_token_around_image>", "<global-img>", *TILES,
    "<image_soft_token>", "<start_of_image>", "<end_of_image>",
    "<|image>", "<image|>", "<|patch|>", "<|image|>", "<|image_start|>",
    "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
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


def _gemma3():
    # An image is longer than the window of the first layer.
    text = {
        **TEXT, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 10, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config={"image_size": 112, **VISION},
        image_token_index=SPECIAL.index("<image_soft_token>") + 256,
        mm_tokens_per_image=16, tie_word_embeddings=False,
    )  # fmt: skip
    processor = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    return transformers.Gemma3ForConditionalGeneration(config), processor


def _panned():
    made, _ = _gemma3()
    return made, Gemma3ImageProcessorPil(
        size={"height": 112, "width": 112}, do_pan_and_scan=True,
        pan_and_scan_min_crop_size=60, pan_and_scan_max_num_crops=3,
        pan_and_scan_min_ratio_to_activate=1.3,
    )  # fmt: skip


def _gemma4(text=None, **vision):
    # An image is longer than the window of the second layer.
    text = {
        **TEXT, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 10, "global_head_dim": 24, "pad_token_id": 0,
        "hidden_size_per_layer_input": 0, "num_key_value_heads": 2,
        "use_bidirectional_attention": "vision", **(text or {}),
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, audio_config=None, image_token_id=IMAGE,
        vision_config={
            **VISION, "patch_size": 4, "num_key_value_heads": 2, "head_dim": 12,
            "position_embedding_size": 80, **vision,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    made = transformers.Gemma4ForConditionalGeneration(config)
    draws = np.random.default_rng(8)
    for name, values in made.named_buffers():
        kind = name.rpartition(".")[2]
        if kind in ("std_bias", "std_scale"):
            drawn = draws.standard_normal(values.shape) * 0.2
            values.copy_(torch.tensor(drawn + (kind == "std_scale")))
        elif kind.endswith(("_min", "_max")):
            bound = draws.uniform(0.3, 1.0)
            values.fill_(-bound if kind.endswith("_min") else bound)
    processor = Gemma4ImageProcessorPil(
        max_soft_tokens=70, patch_size=4, pooling_kernel_size=3
    )
    return made, processor


def _gemma4_small():
    text = {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
        "use_bidirectional_attention": None,
    }  # fmt: skip
    return _gemma4(text, use_clipped_linears=True)


def _llama4():
    text = {
        **TEXT, "intermediate_size_mlp": 80, "num_local_experts": 2,
        "num_experts_per_tok": 1, "moe_layers": [1], "pad_token_id": None,
    }  # fmt: skip
    config = transformers.Llama4Config(
        text_config=text, image_token_index=SPECIAL.index("<|patch|>") + 256,
        vision_config={
            **VISION, "image_size": 56, "intermediate_size": 128,
            "projector_input_dim": 40, "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    made = transformers.Llama4ForConditionalGeneration(config)
    return made, Llama4Processor(56, 6)


def _paddleocr_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.PaddleOCRVLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={"image_size": 84, **VISION},
        image_token_id=IMAGE, vision_start_token_id=258, vision_end_token_id=259,
        video_token_id=260, tie_word_embeddings=False,
    )  # fmt: skip
    processor = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 56 * 56, "longest_edge": 140 * 140}
    )
    return transformers.PaddleOCRVLForConditionalGeneration(config), processor


KINDS = {
    "mistral3": _mistral3, "smolvlm": _smolvlm, "gemma3": _gemma3,
    "gemma3_panned": _panned, "gemma4": lambda: _gemma4(standardize=True),
    "gemma4_small": _gemma4_small, "llama4": _llama4,
    "paddleocr_vl": _paddleocr_vl,
}  # fmt: skip
SIZES = [(70, 45), (200, 310), (28, 28), (1, 60), (500, 400), (90, 13)]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    made, processor = KINDS[request.param]()
    fill(made)
    if "gemma4" in request.param:
        # transformers takes a placeholder that it generates for padding.
        made.lm_head.weight.data[IMAGE] = 0
    made.save_pretrained(folder)
    if request.param == "llama4":
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(processor.fields))
    else:
        processor.save_pretrained(folder)
    rules = byte_rules()
    rules.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    rules.save(str(folder / "tokenizer.json"))
    mark = "<start_of_image>" if "gemma3" in request.param else "<image>"
    mark = "<|image|>" if request.param == "llama4" else mark
    template = TEMPLATE.replace("<image>", mark)
    fields = {"chat_template": template, "eos_token": "<|endoftext|>"}
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
    if kind == "paddleocr_vl":
        given = dict(model.processor(images=[image], return_tensors="pt"))
        return given, "<image>" * (int(given["image_grid_thw"].prod()) // 4)
    if kind == "llama4":
        values, (rows, columns) = model.processor(image)
        # As the processor of transformers writes it, which cannot be made without
        # the tokenizer of Llama.
        tile = "<|patch|>" * 4
        row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
        tiles = row * rows if rows * columns > 1 else ""
        text = f"<|image_start|>{tiles}<|image|>{tile}<|image_end|>"
        return {"pixel_values": values}, text
    if kind == "gemma4":
        given = dict(model.processor(images=[image], return_tensors="pt"))
        (count,) = given.pop("num_soft_tokens_per_image").tolist()
        return given, f"<|image>{'<image>' * count}<image|>"
    if kind == "gemma3":
        given = dict(model.processor(images=[image], return_tensors="pt"))
        (crops,) = given.pop("num_crops").tolist()
        one = "<image_soft_token>" * 16
        if not crops:
            return given, one
        # As the processor of transformers writes it, which cannot be made without
        # the tokenizer of Gemma.
        more = " ".join([one] * crops)
        return given, (
            f"Here is the original image {one} and here are some crops to help you see "
            f"better {more}"
        )
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
    if model.model.config.model_type == "paddleocr_vl":
        # 1,760 x 1,320 pixels of 1,536 x 1,536.
        assert grid == (126, 94)
        return
    if model.model.config.model_type == "gemma4":
        # 266 features, of 3 x 3 patches each.
        assert grid == (3 * 19, 3 * 14)
        return
    # 1024 x 768 in squares of 28 pixels; 224 x 168 in tiles of 56.
    is_gemma = model.model.config.model_type == "gemma3"
    assert grid == ((74, 56) if is_pixtral else (8, 8) if is_gemma else (16, 12))


def patches_of(model, given):
    """The patches of transformers' pixels, row by row of features."""
    if model.model.config.model_type == "gemma4":
        places = given["image_position_ids"][0].numpy()
        used = places[:, 0] >= 0
        (columns, rows), values = places[used].T, given["pixel_values"][0][used].numpy()
        order = np.lexsort((columns % 3, rows % 3, columns // 3, rows // 3))
        values = 2 * (values[order].reshape(-1, 4, 4, 3) - 0.5)
        return values.transpose(0, 3, 1, 2).reshape(len(values), -1)
    pixels = np.asarray(given["pixel_values"])
    if model.model.config.model_type == "paddleocr_vl":
        _, rows, columns = given["image_grid_thw"][0].tolist()
        x = pixels.reshape(rows // 2, 2, columns // 2, 2, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    count, channels, height, width = pixels.shape
    x = pixels.reshape(count, channels, height // 28, 2, 14, width // 28, 2, 14)
    return x.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * 14 * 14)


def feature_of(text):
    """What stands for a feature in the text of an image."""
    names = "<image_soft_token>", "<|patch|>"
    return next((name for name in names if name in text), "<image>")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_patches_and_tokens_are_those_of_the_processor(model, size, mode):
    settings = open_model(model.folder).vision.settings
    image = picture(*size, mode=mode)
    given, text = processed(model, image)
    found = settings.patches(ImageDecoder().decode(image).pixels, "image")
    expected = patches_of(model, given)
    assert found.values.shape == expected.shape
    assert np.abs(found.values - expected).max() <= 1e-6
    pieces = settings.pieces(found.grid)
    feature = feature_of(text)
    assert text == "".join(
        feature * piece if isinstance(piece, int) else piece for piece in pieces
    )


@pytest.mark.scaled
def test_patches_and_tokens_of_random_images(model):
    settings, compared = open_model(model.folder).vision.settings, 0
    count = scaled(8, 24, long=200)
    kind = model.model.config.model_type
    for image in random_pictures(count, f"patches of {kind}"):
        try:
            given, text = processed(model, image)
        except (ValueError, ZeroDivisionError):
            continue  # of a side that it rounds to no pixel; below is how many
        found = settings.patches(ImageDecoder().decode(image).pixels, "image")
        expected = patches_of(model, given)
        assert found.values.shape == expected.shape, image
        assert np.abs(found.values - expected).max() <= 1e-6, image
        feature = feature_of(text)
        pieces = settings.pieces(found.grid)
        assert text == "".join(
            feature * piece if isinstance(piece, int) else piece for piece in pieces
        )
        compared += 1
    assert compared > count / 2


def features_of(made, given):
    """The features of an image in transformers."""
    if made.config.model_type == "llama4":
        hidden = made.get_image_features(**given, return_dict=True).last_hidden_state
        return made.multi_modal_projector(hidden).flatten(0, 1).numpy()
    visual = made.model.get_image_features(**given, return_dict=True)
    return torch.cat(list(visual.pooler_output)).numpy()


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_features_are_those_of_transformers(model, device):
    vision, config = open_model(model.folder).vision, EngineConfig(dtype="float32")
    executor = load_encoder(vision, make_backend(device), config)
    encoder = VisionEncoder(vision, executor)
    # transformers cannot split the features of an image of one.
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:2])]
    together = encoded_together(encoder, images)
    for image, joint in zip(images, together, strict=True):
        given, _ = processed(model, image)
        with torch.no_grad():
            expected = features_of(model.model, given)
        alone = encoded(encoder, image)
        assert (joint.grid, joint.parts) == (alone.grid, alone.parts)
        for features in (alone.features, joint.features):
            if model.model.config.model_type.startswith("gemma"):
                features = features * 8  # it multiplies embeddings by the root of 64
            assert features.shape == expected.shape
            error = np.abs(features - expected).max()
            assert error <= 1e-4 * np.abs(expected).max()
    encoder.close()


def budget_of(model, tokens):
    """Tokens of a step, which holds all features that attend in both directions."""
    text = model.model.config.text_config
    is_wide = getattr(text, "use_bidirectional_attention", None) == "vision"
    return max(tokens, 80) if is_wide else tokens


def expected_answer(model, ids, image, count):
    given, _ = processed(model, image)
    if model.model.config.model_type == "gemma3":
        soft = model.model.config.image_token_index
        given["token_type_ids"] = (torch.tensor([ids]) == soft).int()
    if model.model.config.model_type == "gemma4":
        given["mm_token_type_ids"] = (torch.tensor([ids]) == IMAGE).int()
    if model.model.config.model_type == "paddleocr_vl":
        return whole_answer(model.model, ids, given, count)
    with torch.no_grad():
        found = model.model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=int), **given,
            max_new_tokens=count, min_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return found[0, len(ids) :].tolist()


def whole_answer(made, ids, given, count):
    """Greedy tokens, each by the logits of the whole text.

    With its cache, transformers 5.23 finds other tokens of PaddleOCR-VL than without.
    """
    found = torch.tensor([ids])
    for _ in range(count):
        given["mm_token_type_ids"] = (found == IMAGE).int()
        made.model.rope_deltas = None
        with torch.no_grad():
            logits = made(found, attention_mask=torch.ones_like(found), **given).logits
        logits[:, -1, EOS] = -torch.inf  # as with ``min_new_tokens``
        found = torch.cat([found, logits[:, -1:].argmax(-1)], 1)
    return found[0, len(ids) :].tolist()


def test_answers_are_those_of_transformers(model):
    with InferenceEngine(
        open_model(model.folder),
        config=EngineConfig(
            backend="reference", dtype="float32", token_budget=budget_of(model, 32)
        ),
    ) as engine:
        assert engine._encoder.images._encoder is None  # texts do not pay for it
        tokenizer = engine._encoder.tokenizer("test")
        for seed, size in enumerate([(70, 45), (200, 310)]):
            image = picture(*size, seed)
            text = processed(model, image)[1]
            if model.model.config.model_type == "gemma3":
                one = "<image_soft_token>" * 16
                text = text.replace(one, f"\n\n<start_of_image>{one}<end_of_image>\n\n")
            text = f"See {text} What?"
            ids = tokenizer.encode(text, add_special=False)
            answer = expected_answer(model, ids, image, 6)
            options = {"max_tokens": 6, "min_tokens": 6}
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


def engine_of(model, device, monkeypatch, **config):
    """An engine on a backend, by the name of its library."""
    backend = "cpu"
    if device == "jax":
        pytest.importorskip("inl_tpu")
        monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
        backend = "tpu"
    elif device == "torch":
        monkeypatch.setenv("INL_CPU", "torch")
    config = EngineConfig(backend=backend, dtype="float32", **config)
    return InferenceEngine(open_model(model.folder), config=config)


@pytest.fixture(scope="module")
def expected(model):
    """Token ids, image and greedy answer of three prompts."""
    cases = []
    rules = open_model(model.folder).checkpoint.tokenizer()
    for seed, size in enumerate([(70, 45), (200, 310)]):
        image = picture(*size, seed)
        text = processed(model, image)[1]
        ids = rules.encode(f"See this: {text} What is it?", add_special=False)
        cases.append((ids, image, expected_answer(model, ids, image, 6)))
    # Of the first prompt's blocks it can share those that end inside of the image.
    ids, image, _ = cases[0]
    token = open_model(model.folder).vision.placeholder
    short = ids[: len(ids) - ids[::-1].index(token) + 1]
    return [*cases, (short, image, expected_answer(model, short, image, 6))]


@pytest.mark.parametrize("device", ["native", "torch", "jax"])
def test_schedules_give_the_same_tokens(model, expected, device, monkeypatch):
    """Chunks that end at any place of an image, batches, and prefixes that are hit."""
    options = {"max_tokens": 6, "min_tokens": 6}
    text = list(range(3, 40))
    budget = budget_of(model, 24)
    with engine_of(
        model, device, monkeypatch, token_budget=budget, max_batch=4
    ) as engine:
        alone = list(engine.generate(text, **options).token_ids)
        for _ in range(2):
            batch = []
            for ids, image, _ in expected:
                batch.append(engine.submit(text, **options))
                batch.append(engine.submit(ids, images=[image], **options))
            found = [list(handle.result().token_ids) for handle in batch]
            assert found[::2] == [alone] * 3
            assert found[1::2] == [answer for *_, answer in expected]
        assert engine.stats.prefix_hit_tokens > 2 * len(text)


def test_a_preempted_request_gives_the_same_tokens(model, expected, monkeypatch):
    if "panned" in model.folder.name:
        pytest.skip("its windowed layer leaves room for both; see gemma3")
    ids, image, _ = expected[1]
    count = 40
    answer = expected_answer(model, ids, image, count)
    options = {"max_tokens": count, "min_tokens": count}
    # Blocks for two prompts, and not for two answers.
    tokens = 2 * len(ids) + count
    cell = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, lanes, bytes
    if "gemma4" in model.folder.name:
        # Of two kinds of layers: those with a cache of their own.
        cell = 2 * 2 * 4 * (40 if "small" in model.folder.name else 64)
    with engine_of(
        model, "native", monkeypatch, cache_bytes=tokens * cell, prefix_cache=False,
        context=len(ids) + count + 16,
    ) as engine:  # fmt: skip
        handles = [engine.submit(ids, images=[image], **options) for _ in range(2)]
        found = [list(handle.result().token_ids) for handle in handles]
        assert engine.stats.preemptions
    assert found == [answer] * 2


PLACES = {
    "mistral3": "[IMG]", "gemma4": "<|image|>", "paddleocr_vl": "<|IMAGE_PLACEHOLDER|>",
}  # fmt: skip
"""Tokens at the place of a feature, other than in the folders of these tests."""


def test_a_gguf_file_with_its_projector_gives_the_same(model, expected, tmp_path):
    """Answers are those of transformers, of files beside each other."""
    if "panned" in model.folder.name:
        pytest.skip("its files do not say whether to pan and scan")
    kind = model.model.config.model_type
    if kind == "llama4":
        pytest.skip("its language model is not read from GGUF files")
    text, projector = tmp_path / "text.gguf", tmp_path / "mmproj-text.gguf"
    tokens = gguf_tokens(SPECIAL)
    tokens[IMAGE] = PLACES.get(kind, tokens[IMAGE])
    write_text(model.model, text, tokens)
    write_projector(model.model, projector)
    config = EngineConfig(backend="cpu", dtype="float32")
    settings = open_model(model.folder).vision.settings
    language = open_model(text)
    found, theirs = language.vision.settings, settings.normalization
    if kind == "gemma4":
        # Files do not state max_soft_tokens.
        assert found.features == 280
        found = replace(found, features=settings.features)
        language = replace(language, vision=replace(language.vision, settings=found))
    assert replace(found, normalization=theirs) == settings
    assert found.normalization.mean == pytest.approx(theirs.mean, rel=1e-7)
    assert found.normalization.std == pytest.approx(theirs.std, rel=1e-7)
    with InferenceEngine(language, config=config) as engine:
        for ids, image, answer in expected:
            found = engine.generate(ids, images=[image], max_tokens=6, min_tokens=6)
            assert list(found.token_ids) == answer


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_a_step_must_hold_what_attends_in_both_directions(model, expected, monkeypatch):
    ids, image, _ = expected[0]
    with (
        engine_of(model, "native", monkeypatch, token_budget=18, max_batch=4) as engine,
        pytest.raises(RequestError, match=r"16 tokens that attend.*accepts 15 "),
    ):
        engine.generate(ids, images=[image])
