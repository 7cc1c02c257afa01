"""Images in prompts, compared with transformers on tiny random checkpoints."""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import itertools
import json
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from depth import scaled  # noqa: E402
from image_models import (  # noqa: E402
    END,
    KINDS,
    PAD,
    SPECIAL,
    START,
    encoded,
    encoded_together,
    picture,
    random_pictures,
    tiny_model,
)
from inl import EngineConfig, InferenceEngine  # noqa: E402
from inl.backend.base import DeviceMemory  # noqa: E402
from inl.cli.main import main  # noqa: E402
from inl.device import Device  # noqa: E402
from inl.engine.image_queue import Pace  # noqa: E402
from inl.errors import RequestError  # noqa: E402
from inl.executor.cache_sizing import LEAST_SHARE, vision_bytes  # noqa: E402
from inl.executor.encoder_executor import PartialEncoding, load_encoder  # noqa: E402
from inl.executor.load_plan import LoadPlan  # noqa: E402
from inl.executor.model_loader import open_model  # noqa: E402
from inl.executor.vision_encoder import VisionEncoder  # noqa: E402
from inl.images.decoding import ImageDecoder  # noqa: E402
from inl.plugin import make_backend  # noqa: E402
from projector_files import (  # noqa: E402
    TEXTS,
    gguf_tokens,
    write_projector,
    write_text,
)

SIZES = ((70, 45), (200, 310), (28, 28), (1, 60))
"""Width and height of images."""


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("size", [*SIZES, (500, 400), (13, 900), (1023, 17)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
def test_patches_are_those_of_the_processor(model, size, mode):
    settings = open_model(model[1]).vision.settings
    image = picture(*size, mode=mode)
    theirs = model.processor(images=[image], return_tensors="np")
    found = settings.patches(ImageDecoder().decode(image).pixels, "image")
    assert found.grid == tuple(theirs["image_grid_thw"][0, 1:])
    assert np.abs(found.values - theirs["pixel_values"]).max() <= 1e-6


@pytest.mark.scaled
def test_patches_of_random_images(model):
    settings, compared = open_model(model[1]).vision.settings, 0
    count = scaled(8, 24, long=200)
    for image in random_pictures(count, f"patches of {model.folder.name}"):
        if max(image.size) > 200 * min(image.size):
            with pytest.raises(ValueError, match="aspect ratio"):
                model.processor(images=[image], return_tensors="np")
            with pytest.raises(RequestError, match="ratio is at most 200"):
                settings.patches(ImageDecoder().decode(image).pixels, "image")
            continue
        theirs = model.processor(images=[image], return_tensors="np")
        found = settings.patches(ImageDecoder().decode(image).pixels, "image")
        assert found.grid == tuple(theirs["image_grid_thw"][0, 1:]), image
        assert np.abs(found.values - theirs["pixel_values"]).max() <= 1e-6, image
        compared += 1
    assert compared > count / 2


def encoder_on(name, vision, monkeypatch):
    """An encoder on a backend, by the name of its library."""
    if name == "jax":
        pytest.importorskip("jax")
        monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
        backend = pytest.importorskip("inl_tpu.backend").TpuBackend(Device("tpu:0"))
    elif name == "torch":
        module = importlib.import_module("inl_cpu.torch_backend")
        backend = module.TorchCpuBackend(Device("cpu:0"))
    else:
        backend = make_backend(name)
    config = EngineConfig(dtype="float32")
    return VisionEncoder(vision, load_encoder(vision, backend, config))


@pytest.mark.parametrize("device", ["reference", "cpu", "torch", "jax"])
def test_features_are_those_of_transformers(model, device, monkeypatch):
    made, folder, _ = model
    encoder = encoder_on(device, open_model(folder).vision, monkeypatch)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    together = encoded_together(encoder, images)
    for image, joint in zip(images, together, strict=True):
        given = model.processor(images=[image], return_tensors="pt")
        with torch.no_grad():
            visual = made.model.visual(given["pixel_values"], given["image_grid_thw"])
        found = encoded(encoder, image)
        added = getattr(visual, "deepstack_features", None) or []
        assert found.added.shape[1] == len(added)
        assert (joint.grid, joint.digest) == (found.grid, found.digest)
        for each in (found, joint):
            pairs = zip(
                [visual.pooler_output, *added],
                [each.features, *each.added.swapaxes(0, 1)],
                strict=True,
            )
            for expected, features in pairs:
                assert features.shape == expected.shape
                error = np.abs(features - expected.numpy()).max()
                assert error <= 1e-4 * expected.abs().max()
    encoder.close()


def expected_answer(model, prompt, images, count):
    """Greedy tokens of transformers for ids with a placeholder for each feature."""
    given = model.processor(images=list(images), return_tensors="pt")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == PAD).int(), **given,
            max_new_tokens=count, min_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return found[0, len(prompt) :].tolist()


def prompt_of(model, images, seed=0):
    """Ids of text around images."""
    rng, ids = np.random.default_rng(seed), []
    for image in images:
        grid = model.processor(images=[image])["image_grid_thw"][0]
        ids += rng.integers(3, 250, 5).tolist()
        ids += [START, *[PAD] * (int(grid.prod()) // 4), END]
    return ids + rng.integers(3, 250, 4).tolist()


PROMPTS = [
    [picture(70, 45, 1)],
    [picture(200, 310, 2), picture(60, 60, 3)],
    [picture(60, 60, 3), picture(33, 150, 4), picture(70, 45, 1)],
]


@pytest.fixture(scope="module")
def expected(model):
    prompts = [prompt_of(model, images, at) for at, images in enumerate(PROMPTS)]
    return [
        (ids, images, expected_answer(model, ids, images, 9))
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
    if "speculation" in config and model.model.config.model_type == "qwen3_5":
        pytest.skip("its recurrent state is refused with drafts")
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


def data_uri(image, kind="png"):
    data = io.BytesIO()
    image.save(data, kind)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def conversation(*images):
    parts = [{"type": "text", "text": "See"}]
    parts += [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def test_conversations_have_images_in_any_form(model, tmp_path):
    image, other = picture(70, 45, 1), picture(60, 60, 3)
    path = tmp_path / "image.png"
    image.save(path)
    with opened(model, "cpu") as engine:
        messages = conversation(image, other)
        ids = engine.chat_ids(messages)
        assert ids.count(PAD) == prompt_of(model, [image, other]).count(PAD) >= 8
        answer = expected_answer(model, ids, [image, other], 6)
        options = {"max_tokens": 6, "ignore_eos": True}
        found = [
            engine.generate(ids, images=[image, other], **options).token_ids,
            engine.generate(messages, **options).token_ids,
            engine.generate(
                conversation(path.read_bytes(), data_uri(other)), **options
            ).token_ids,
            engine.generate(conversation(path, other), **options).token_ids,
        ]
        assert [list(each) for each in found] == [answer] * 4
        told = engine.chat(messages, **options)
        assert told.text == engine.generate(messages, **options).text


def test_equal_ids_with_other_images_share_no_blocks(model):
    first, second = picture(112, 112, 1), picture(112, 112, 2)
    ids = prompt_of(model, [first])
    answers = [expected_answer(model, ids, [each], 6) for each in (first, second)]
    assert answers[0] != answers[1]
    with opened(model, "cpu") as engine:
        found = [
            list(engine.generate(ids, images=[each], max_tokens=6).token_ids)
            for each in (first, second, first)
        ]
        hits = engine.stats.prefix_hit_tokens
    assert found == [answers[0], answers[1], answers[0]]
    if model.model.config.model_type != "qwen3_5":  # its state is not kept in blocks
        assert hits >= 16  # the third shares the first one's blocks


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([5, PAD, PAD, 6], [picture(28, 28)], "has 4 features, found fewer"),
        ([5, *[PAD] * 5, 6], [picture(28, 28)], "more than the 1 images"),
        ([5, *[PAD] * 4, 6], [picture(28, 28)] * 2, r"images\[1\]: has 4 features"),
        ("no place", [picture(28, 28)], "found 1 for 0 places"),
        ([5, *[PAD] * 4], [b"GIF89a"], "cannot be decoded"),
        ([5, *[PAD] * 4], [picture(28, 28).tobytes()], "cannot be decoded"),
        ([5, *[PAD] * 4], ["data:text/html;base64,aGk="], "accepts data:TYPE"),
        ([5, *[PAD] * 4], ["data:image/png;base64,a!"], "accepts base64"),
        ([5, *[PAD] * 4], ["/no/such/file.png"], "No such file"),
        ([5, *[PAD] * 4], [7], "found int"),
        ([5, *[PAD] * 4], [picture(300, 1)], "ratio"),
        ([5, *[PAD] * 4], picture(28, 28), "accepts a list of images"),
        ([5, *[PAD] * 4], [picture(28, 28)] * 257, "found 257, accepts at most 256"),
    ],
)
def test_wrong_images_are_refused(model, ids, images, message):
    with (
        opened(model, "reference") as engine,
        pytest.raises(RequestError, match=message),
    ):
        engine.generate(ids, images=images)


def test_one_image_of_a_prompt_is_in_memory_at_a_time(model, monkeypatch):
    """Each may take 192 MiB, and a prompt has up to 256."""
    images = [picture(28, 28), picture(56, 28), picture(28, 28)]
    with opened(model, "cpu") as engine:
        prompts, seen = engine._encoder.images, []
        decode = prompts._decoder.decode

        def watched(image, where):
            assert not any(each() is not None for each in seen)
            found = decode(image, where)
            seen.append(weakref.ref(found.pixels))
            return found

        monkeypatch.setattr(type(prompts._decoder), "decode", staticmethod(watched))
        engine.generate(conversation(*images), max_tokens=1)
    assert len(seen) == 3


def test_frames_of_a_video_are_images(model):
    """One image for each frame, in a list or in one data URI."""
    frames = [picture(70, 45, seed) for seed in range(2)]
    joined = ",".join(data_uri(frame).partition(",")[2] for frame in frames)
    images = [{"type": "image", "image": frame} for frame in frames]
    videos = (
        {"type": "video", "video": frames},
        {"type": "video", "video": [data_uri(frame) for frame in frames]},
        {"type": "video_url", "video_url": {"url": f"data:video/png;base64,{joined}"}},
    )
    with InferenceEngine(
        open_model(model.folder), config=EngineConfig(backend="cpu", dtype="float32")
    ) as engine:
        text = {"type": "text", "text": "What?"}

        def said(*parts):
            return [{"role": "user", "content": [*parts, text]}]

        options = {"max_tokens": 4, "ignore_eos": True}
        expected = engine.generate(said(*images), **options)
        for video in videos:
            assert engine.chat_ids(said(video)) == engine.chat_ids(said(*images))
            found = engine.generate(said(video), **options)
            assert found.token_ids == expected.token_ids
        for wrong in ([], "clip.mp4", "data:video/mp4;base64,AAAA", None):
            with pytest.raises(RequestError, match="a video, accepts its frames"):
                engine.chat_ids(said({"type": "video", "video": wrong}))
        many = {"type": "video", "video": [frames[0]] * 257}
        with pytest.raises(RequestError, match="found 257, accepts at most 256"):
            engine.chat_ids(said(many))


def test_a_message_names_no_file_and_no_address(model):
    """Else a client of the server would read files of its host."""
    with opened(model, "reference") as engine:
        for address in ("/etc/passwd", "http://169.254.169.254/latest", "file:///a"):
            with pytest.raises(RequestError, match="accepts a data URI"):
                engine.chat_ids(conversation(address))


def test_generate_takes_files_of_images(model, tmp_path, capsys):
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    images = [picture(70, 45, 1), picture(60, 60, 3)]
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    words = ["generate", "What?", "--model", str(model.folder), "--json"]
    words += ["--device", "reference", "--max-tokens", "6", "--dtype", "float32"]
    for path in paths:
        words += ["--image", str(path)]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    parts = [{"type": "image", "image": image} for image in images]
    messages = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}
    ]
    with opened(model, "reference") as engine:
        assert told["text"] == engine.generate(messages, max_tokens=6).text


def test_chat_attaches_images(model, tmp_path, monkeypatch, capsys):
    """Those of earlier turns, and of a file that was saved, are seen too."""
    image, other = picture(70, 45, 1), picture(60, 60, 3)
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    image.save(paths[0])
    other.save(paths[1])

    def chat(*lines):
        text = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        words = ["chat", "--model", str(model.folder), "--device", "reference"]
        words += ["--max-tokens", "6", "--temperature", "0", "--dtype", "float32"]
        assert main(words) == 0
        return capsys.readouterr().out

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    shown = chat(
        f"/image {paths[0]}", f"/image {paths[1]}", "What?", f"/save {first}",
        "And now?", f"/save {second}",
    )  # fmt: skip
    assert f"({paths[0]}, 70 x 45 pixels, goes with the next message)" in shown
    chat(f"/load {first}", "And now?", f"/save {tmp_path / 'third.json'}")
    assert (tmp_path / "third.json").read_text() == second.read_text()
    messages = json.loads(second.read_text())["messages"]
    assert [type(each["content"]) for each in messages[::2]] == [list, str]
    messages[0]["content"][:2] = [
        {"type": "image", "image": each} for each in (image, other)
    ]
    with opened(model, "reference") as engine:
        for at in (1, 3):
            told = engine.generate(messages[:at], max_tokens=6)
            assert told.text == messages[at]["content"]
        assert (
            engine.generate([{**messages[0], "content": "What?"}], max_tokens=6).text
            != (messages[1]["content"])
        )
    with pytest.raises(AssertionError):
        chat(f"/image {tmp_path / 'none.png'}")
    assert "No such file" in capsys.readouterr().err


def test_a_gguf_file_with_its_projector_gives_the_same(model, expected, tmp_path):
    """Answers are those of transformers, of files beside each other."""
    if model.model.config.model_type not in TEXTS:
        pytest.skip("its text files are those of test_gguf_recurrent.py")
    text, projector = tmp_path / "text.gguf", tmp_path / "mmproj-text.gguf"
    write_text(model.model, text, gguf_tokens(SPECIAL, 264))
    alone = open_model(text)
    assert alone.vision is None
    alone.checkpoint.close()
    write_projector(model.model, projector)
    config = EngineConfig(backend="cpu", dtype="float32")
    with InferenceEngine(open_model(text), config=config) as engine:
        for ids, images, answer in expected:
            found = engine.generate(ids, images=images, max_tokens=9, ignore_eos=True)
            assert list(found.token_ids) == answer


def watched(engine, monkeypatch):
    """The events of an engine: steps, and parts with the number of open requests."""
    events = []
    advance, step = PartialEncoding.advance, engine._core.step

    def counted(self, parts):
        before = self.computed
        advance(self, parts)
        events.append((self.computed - before, len(engine._core.live)))

    def stepped():
        events.append("step")
        return step()

    monkeypatch.setattr(PartialEncoding, "advance", counted)
    monkeypatch.setattr(engine._core, "step", stepped)
    ticks = itertools.count()
    # Time that goes on by one with each look: a turn then has one part.
    queue = engine._encoder.images._queue
    monkeypatch.setattr(queue, "_pace", Pace(lambda: float(next(ticks))))
    return events


@pytest.mark.parametrize("driver", ["none", "thread", "asyncio"])
def test_a_step_is_between_the_parts_of_an_image(model, expected, driver, monkeypatch):
    """So a large image stalls those who decode for a part, whoever computes steps."""
    ids, images, answer = expected[1]
    text = list(range(3, 40))
    options = {"max_tokens": 9, "ignore_eos": True}
    with opened(model, "cpu") as engine:
        alone = engine.generate(text, max_tokens=60, ignore_eos=True).token_ids
        events = watched(engine, monkeypatch)
        handle = engine.submit(text, max_tokens=60, ignore_eos=True)
        thread = None
        if driver == "thread":
            thread = threading.Thread(target=handle.result)
            thread.start()
        elif driver == "asyncio":

            async def other():
                return await engine.agenerate(text, **options)

            thread = threading.Thread(target=lambda: asyncio.run(other()))
            thread.start()
        found = engine.generate(ids, images=images, **options)
        assert list(found.token_ids) == answer
        assert handle.result().token_ids == alone
        if thread is not None:
            thread.join()
    turns = [at for at, event in enumerate(events) if event != "step"]
    # Of each of two images: before the layers, three of them, and the results.
    assert [events[at][0] for at in turns] == [1] * 10
    # Other threads may have computed all steps of their requests by then.
    assert driver != "none" or all(events[at][1] for at in turns)
    for first, second in itertools.pairwise(turns):
        assert second - first > 1 or not events[first][1], events


def test_images_are_encoded_on_another_device(model, expected, monkeypatch):
    """Without the engine's lock, so that its steps go on meanwhile."""
    with opened(model, "cpu", vision_backend="reference") as engine:
        lock, held = engine._dispatcher.lock, []
        advance = PartialEncoding.advance

        def counted(self, parts):
            held.append(lock.is_mine)
            advance(self, parts)

        monkeypatch.setattr(PartialEncoding, "advance", counted)
        for ids, images, answer in expected:
            found = engine.generate(ids, images=images, max_tokens=9, ignore_eos=True)
            assert list(found.token_ids) == answer
        encoder = engine._encoder.images._encoder
        assert str(encoder.executor.backend.device) == "reference:0"
        assert engine.device == "cpu:0"
    assert held
    assert not any(held)
    assert encoder.executor.loaded.weights is None


def test_images_of_concurrent_requests_share_programs(model, expected, monkeypatch):
    """Those that come while a batch is computed are the next one, equal ones once."""
    ids, images, answer = expected[2]
    sizes = []
    begin = VisionEncoder.begin
    with opened(model, "cpu") as engine:
        queue = engine._encoder.images._queue
        monkeypatch.setattr(queue, "_pace", Pace(lambda: 0.0))  # a part takes no time

        def counted(self, pairs):
            sizes.append(len(pairs))
            if len(sizes) == 1:
                # All others are waiting when the first program is complete.
                for thread in threads:
                    thread.start()
                while len(queue._waiting) < 9:
                    time.sleep(0.001)
            return begin(self, pairs)

        monkeypatch.setattr(VisionEncoder, "begin", counted)
        answers = []

        def ask():
            found = engine.generate(ids, images=images, max_tokens=9, ignore_eos=True)
            answers.append(list(found.token_ids))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        engine.generate(
            prompt_of(model, [picture(28, 28)]), images=[picture(28, 28)], max_tokens=1
        )
        for thread in threads:
            thread.join()
    assert answers == [answer] * 3
    assert sizes == [1, 3]


def test_the_cache_leaves_room_for_the_encoder(model, monkeypatch):
    language, backend = open_model(model.folder), make_backend("reference")
    free = 64 << 20
    config = EngineConfig(dtype="float32", max_batch=512)
    texts = replace(language, vision=None)

    def blocks(each, free):
        memory = DeviceMemory(free, free)
        monkeypatch.setattr(type(backend), "memory", lambda _: memory)
        return LoadPlan.of(each, backend, config).limits.blocks[0]

    counts = [blocks(each, free) for each in (texts, language)]
    reserved = vision_bytes(language.vision, "float32")
    stored = language.vision.checkpoint
    weights = sum(np.prod(stored.spec(name)[1]) for name in stored.names())
    assert reserved > 4 * weights
    # Recurrent state takes its part of any size.
    block = free / 2 * LEAST_SHARE / (counts[0] - blocks(texts, free // 2))
    lost = (counts[0] - counts[1]) * block
    assert lost == pytest.approx(LEAST_SHARE * reserved, abs=2 * block)
    assert lost > 2 * block
