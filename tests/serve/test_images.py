"""Images over HTTP in each dialect."""

from __future__ import annotations

import base64
import struct
import zlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from image_models import picture, tiny_model
from image_servers import ImageServer, encoded, opened, uri

IMAGES = [picture(70, 45, 1), picture(60, 60, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl")).folder


@pytest.fixture(scope="module", params=[0, 1], ids=["", "frontends"])
def server(folder, request):
    with ImageServer(folder, frontends=request.param) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder):
    """The engine's own answer."""
    parts = [{"type": "text", "text": "See"}]
    parts += [{"type": "image", "image": image} for image in IMAGES]
    with opened(folder) as engine:
        return engine.chat([{"role": "user", "content": parts}], max_tokens=6).text


def header(side):
    """A PNG that states so many pixels a side and has none."""
    fields = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    sizes = struct.pack(">I", 13), struct.pack(">I", zlib.crc32(fields))
    end = struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    return b"".join([b"\x89PNG\r\n\x1a\n", sizes[0], fields, sizes[1], end])


BOMB = f"data:image/png;base64,{base64.b64encode(header(30_000)).decode()}"
URIS = [uri(image) for image in IMAGES]


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


FRAME = encoded(IMAGES[0])
VIDEO = f"data:video/png;base64,{FRAME},{FRAME}"


@pytest.mark.parametrize("part", [
    {"type": "video_url", "video_url": {"url": VIDEO}},
    {"type": "video", "video": [f"data:image/png;base64,{FRAME}"] * 2},
], ids=["uri", "list"])  # fmt: skip
def test_frames_of_a_video_are_images(server, part):
    _, images = chat(server, *[f"data:image/png;base64,{FRAME}"] * 2)
    parts = [{"type": "text", "text": "See"}, part]
    messages = [{"role": "user", "content": parts}]
    status, answer = server.post(
        "/v1/chat/completions", messages=messages, max_tokens=6, temperature=0
    )
    assert status == 200, answer
    assert answer["choices"][0]["message"] == images["choices"][0]["message"]
    assert answer["usage"]["prompt_tokens"] == images["usage"]["prompt_tokens"] > 12


@pytest.mark.parametrize("url", [
    "data:video/mp4;base64,AAAA", "https://example.org/a.mp4", "data:video/jpeg,AAAA",
])  # fmt: skip
def test_other_videos_are_refused(server, url):
    parts = [{"type": "video_url", "video_url": {"url": url}}]
    status, answer = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": parts}]
    )
    assert status == 400
    assert "found a video; accepts its frames" in answer["error"]["message"]


def test_metrics_of_the_encoder(server):
    """A new picture is one input of a program; its features are kept."""

    def totals():
        lines = server.send("GET", "/metrics")[2].decode().splitlines()
        found = {
            line.partition("{")[0].removeprefix("inl:encoder_"): line
            for line in lines
            if line.startswith("inl:encoder_") and 'kind="images"' in line
        }
        assert 'device="cpu' in found["waiting"]
        return {name: float(line.split()[-1]) for name, line in found.items()}

    before = totals()
    chat(server, uri(picture(41, 47, 9)))
    after = totals()
    chat(server, uri(picture(41, 47, 9)))
    last = totals()
    assert after["programs_total"] - before["programs_total"] == 1
    assert after["inputs_total"] - before["inputs_total"] == 1
    assert after["seconds_total"] > before["seconds_total"]
    assert after["cache_hits_total"] == before["cache_hits_total"]
    assert last["programs_total"] == after["programs_total"]
    assert last["cache_hits_total"] - after["cache_hits_total"] == 1
    assert last["waiting"] == 0


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


def block_of(image):
    data = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
    return {"type": "image", "source": data}


def ask_messages(server, *turns, path="/v1/messages"):
    options = {} if path.endswith("tokens") else {"max_tokens": 6, "temperature": 0}
    return server.post(path, messages=list(turns), **options)


def test_results_of_tools_have_images(server):
    """In each dialect the same: a turn between tags, as this template has no tools."""
    text = "<tool_response>\n", "See", "\n</tool_response>"
    shown = [*[{"type": "text", "text": each} for each in text[:2]],
             {"type": "image_url", "image_url": {"url": URIS[0]}},
             {"type": "text", "text": text[2]}]  # fmt: skip
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    options = {"max_tokens": 6, "temperature": 0}
    look, made = {"role": "user", "content": "Look"}, {"role": "assistant"}
    turns = [look, {**made, "content": call}, {"role": "user", "content": shown}]
    _, answer = server.post("/v1/chat/completions", messages=turns, **options)
    expected = answer["choices"][0]["message"]["content"]
    function = {"name": "look", "arguments": "{}"}
    made["tool_calls"] = [{"id": "a", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "a", "content": shown[1:3]}
    _, answer = server.post(
        "/v1/chat/completions", messages=[look, made, result], **options
    )
    assert answer["choices"][0]["message"]["content"] == expected
    seen = [{"type": "input_text", "text": "See"},
            {"type": "input_image", "image_url": URIS[0]}]  # fmt: skip
    items = [
        look,
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": seen},
    ]
    _, answer = server.post(
        "/v1/responses", input=items, max_output_tokens=6, temperature=0
    )
    assert answer["output"][0]["content"][0]["text"] == expected
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    seen = [{"type": "text", "text": "See"}, block_of(IMAGES[0])]
    result = {"type": "tool_result", "tool_use_id": "a", "content": seen}
    _, answer = ask_messages(
        server, look, {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    )  # fmt: skip
    assert answer["content"][0]["text"] == expected


def test_documents_are_their_texts_and_images(server, expected):
    """A document of texts and images is what it has, behind its title and context."""
    inner = {"type": "content", "content": [*map(block_of, IMAGES)]}
    text = {"type": "text", "media_type": "text/plain", "data": "See"}
    blocks = [
        {"type": "document", "source": text, "citations": {"enabled": False}},
        {"type": "document", "source": inner},
    ]
    status, answer = ask_messages(server, {"role": "user", "content": blocks})
    assert status == 200, answer
    assert answer["content"][0]["text"] == expected
    named = {"type": "document", "title": "A", "context": "B", "source": text}
    found = []
    for content in ([named], [{"type": "text", "text": each} for each in "AB"] + [
        {"type": "text", "text": "See"}]):  # fmt: skip
        status, answer = ask_messages(server, {"role": "user", "content": content})
        assert status == 200, answer
        found.append(answer["content"][0]["text"])
    assert found[0] == found[1] != expected


@pytest.mark.parametrize(("fields", "message"), [
    ({"citations": {"enabled": True}}, "content[0].citations: is not supported"),
    ({"source": {"type": "base64", "media_type": "application/pdf", "data": "A"}},
     "with source 'base64', accepts text or content"),
    ({"source": {"type": "content", "content": [{"type": "document"}]}},
     "found a document in a document"),
])  # fmt: skip
def test_other_documents_are_refused(server, fields, message):
    text = {"type": "text", "media_type": "text/plain", "data": "See"}
    block = {"type": "document", "source": text, **fields}
    status, answer = ask_messages(server, {"role": "user", "content": [block]})
    assert status == 400
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"]


def test_ollama(server, expected):
    message = {"role": "user", "content": "See"}
    images = [encoded(image) for image in IMAGES]
    options = {"temperature": 0, "num_predict": 6}
    found = []
    for path, body in (
        ("/api/chat", {"messages": [{**message, "images": images}]}),
        ("/api/generate", {"prompt": "See", "images": images}),
    ):
        status, answer = server.post(path, options=options, stream=False, **body)
        assert status == 200, answer
        found.append(answer.get("response") or answer["message"]["content"])
    # The images stand before the text.
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in URIS]
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": "See"}]}
    status, answer = server.post(
        "/v1/chat/completions", messages=[turn], max_tokens=6, temperature=0
    )
    assert found == [answer["choices"][0]["message"]["content"]] * 2
    assert found[0] != expected
    status, answer = server.post("/api/generate", prompt="See", images=["aGk="])
    assert status == 400
    assert "images[0]: cannot be decoded" in answer["error"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://169.254.169.254/latest/meta-data", "this server fetches none"),
        ("file:///etc/passwd", "accepts data:image/TYPE"),
        ("/etc/passwd", "accepts data:image/TYPE"),
        ("data:text/html;base64,aGk=", "accepts data:image/TYPE"),
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


DOT = uri(picture(1, 1))


def in_chat(urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}


def in_responses(urls):
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    return "/v1/responses", {"input": [{"role": "user", "content": parts}]}


def in_messages(urls):
    blocks = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": url[len("data:") :].partition(";")[0],
                "data": url.partition(",")[2],
            },
        }
        for url in urls
    ]
    message = {"role": "user", "content": blocks}
    return "/v1/messages", {"messages": [message], "max_tokens": 2}


@pytest.mark.parametrize("write", [in_chat, in_responses, in_messages])
@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([DOT] * 257, "found 257, accepts at most 256"),
        ([DOT] * 10_000, "found 10000, accepts at most 256"),
        ([DOT.replace("png", "jpeg")], "found PNG data of type image/jpeg"),
        ([URIS[0], URIS[0][:422]], "images[1]: cannot be decoded"),
        ([BOMB], "found 30000 x 30000 pixels, accepts"),
    ],
    ids=["257", "10,000", "type", "truncated", "bomb"],
)
def test_hostile_images_are_refused_in_each_dialect(server, write, urls, message):
    path, body = write(urls)
    status, answer = server.post(path, **body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_pixels_of_a_request_are_bounded(server, monkeypatch):
    monkeypatch.setattr("inl.engine.image_prompts.MAX_PIXELS", 2 * 70 * 45)
    status, answer = chat(server, *[URIS[0]] * 2)
    assert status == 200
    status, answer = chat(server, *[URIS[0]] * 3)
    assert status == 400
    assert "images[2]: found 9450 pixels in the images up" in answer["error"]["message"]
