"""Images over HTTP in each dialect."""

from __future__ import annotations

import base64
import io

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from http_servers import HashServer
from image_models import picture, tiny_model
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import open_model

IMAGES = [picture(70, 45, 1), picture(60, 60, 3)]


class ImageServer(HashServer):
    """A server of a tiny model of images and text."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def _open(self, on_step):
        config = EngineConfig(backend="cpu", dtype="float32")
        return InferenceEngine(open_model(self.folder), config=config, on_step=on_step)

    def post(self, path, **body):
        status, _, answer = self.send("POST", path, body)
        return status, answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl")).folder


@pytest.fixture(scope="module")
def server(folder):
    with ImageServer(folder) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder):
    """The engine's own answer."""
    parts = [{"type": "text", "text": "See"}]
    parts += [{"type": "image", "image": image} for image in IMAGES]
    config = EngineConfig(backend="cpu", dtype="float32")
    with InferenceEngine(open_model(folder), config=config) as engine:
        return engine.chat([{"role": "user", "content": parts}], max_tokens=6).text


def encoded(image):
    data = io.BytesIO()
    image.save(data, "png")
    return base64.b64encode(data.getvalue()).decode()


URIS = [f"data:image/png;base64,{encoded(image)}" for image in IMAGES]


def chat(server, *urls):
    parts = [{"type": "text", "text": "See"}]
    parts += [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        for url in urls
    ]
    return server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": parts}],
        max_tokens=6,
        temperature=0,
    )


def test_chat_completions(server, expected):
    status, answer = chat(server, *URIS)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == expected


def test_responses(server, expected):
    parts = [{"type": "input_text", "text": "See"}]
    parts += [{"type": "input_image", "image_url": url} for url in URIS]
    items = [{"role": "user", "content": parts}]
    status, answer = server.post(
        "/v1/responses", input=items, max_output_tokens=6, temperature=0
    )
    assert status == 200, answer
    (message,) = answer["output"]
    assert message["content"][0]["text"] == expected


def test_messages(server, expected):
    blocks = [{"type": "text", "text": "See"}]
    blocks += [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": encoded(image),
            },
        }
        for image in IMAGES
    ]
    status, answer = server.post(
        "/v1/messages",
        messages=[{"role": "user", "content": blocks}],
        max_tokens=6,
        temperature=0,
    )
    assert status == 200, answer
    assert answer["content"][0]["text"] == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://169.254.169.254/latest/meta-data", "this server fetches none"),
        ("file:///etc/passwd", "this server fetches none"),
        ("/etc/passwd", "this server fetches none"),
        ("data:text/html;base64,aGk=", "this server fetches none"),
        ("data:image/png;base64,aGk=", "cannot be decoded"),
        ("data:image/png;base64,%%%", "accepts base64"),
        (
            URIS[0].partition(",")[0] + "," + encoded(IMAGES[0])[:400],
            "cannot be decoded",
        ),
    ],
)
def test_bad_images_are_refused(server, url, message):
    status, answer = chat(server, url)
    assert status == 400
    assert message in answer["error"]["message"]
    assert chat(server, URIS[0])[0] == 200


def test_many_images_are_refused(server):
    status, answer = chat(server, *[URIS[0]] * 300)
    assert status == 400
    assert "found 300, accepts at most 256" in answer["error"]["message"]
