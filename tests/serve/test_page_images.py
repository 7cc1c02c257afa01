"""Images that are dropped on the page at ``/``, pasted and removed, in a browser."""

from __future__ import annotations

import base64
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from browsers import needs_browser, status_has, until, visit
from image_models import picture, tiny_model
from image_servers import ImageServer, opened, png, uri

GIVE = """([target, name, type, texts]) => {
  const data = new DataTransfer();
  texts.forEach((text, at) => {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    data.items.add(new File([bytes], `${at}`, { type }));
  });
  const options = { bubbles: true, cancelable: true };
  const event = name === "paste"
    ? new ClipboardEvent(name, { ...options, clipboardData: data })
    : new DragEvent(name, { ...options, dataTransfer: data });
  document.getElementById(target).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl")).folder


def give(page, name, *files, kind="image/png"):
    texts = [base64.b64encode(file).decode() for file in files]
    page.evaluate(GIVE, ["log", name, kind, texts])


def shown(count):
    return f"document.querySelectorAll('#images img').length === {count}"


@needs_browser
def test_images_are_dropped_shown_and_sent(browser, folder):
    image, other, third = (picture(60 + at, 45, at) for at in range(3))
    with ImageServer(folder) as server:
        page, problems, _ = visit(browser, server)
        bodies = []
        page.on("request", lambda request: bodies.append(request.post_data))
        give(page, "drop", b"text", kind="text/plain")
        until(page, status_has("only images"))
        give(page, "drop", png(image), png(third))
        until(page, shown(2))
        give(page, "paste", png(other))
        until(page, shown(3))
        page.click("[aria-label='Remove image 2']")
        until(page, shown(2))
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "6")
        page.fill("#prompt", "What?")
        page.press("#prompt", "Enter")
        until(page, status_has("ms"))
        until(page, shown(0))
        urls = page.eval_on_selector_all(
            ".message.user img", "(all) => all.map((each) => each.src)"
        )
        assert urls == [uri(image), uri(other)]
        assert page.evaluate(
            "[...document.querySelectorAll('.message.user img')]"
            ".every((each) => each.naturalHeight === 45)"
        )
        # What the browser keeps has no room for them, and says so.
        page.reload()
        until(page, "document.querySelectorAll('.message').length === 2")
        told = page.locator(".message.user").inner_text()
        assert "2 images, which this browser does not keep" in told
        assert not problems
        page.context.close()
        (body,) = (json.loads(body) for body in bodies if body)
        del body["stream_options"]
        status, answer = server.post(
            "/v1/chat/completions", **{**body, "stream": False}
        )
        assert status == 200
    with opened(folder) as engine:
        parts = [{"type": "image", "image": each} for each in (image, other)]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}
        expected = engine.chat([turn], max_tokens=6, temperature=0).text
    assert answer["choices"][0]["message"]["content"] == expected


@needs_browser
def test_large_images_are_shrunk(browser, folder):
    large = png(picture(2600, 200))
    assert len(large) > 1 << 20
    with ImageServer(folder) as server:
        page, problems, _ = visit(browser, server)
        give(page, "drop", large, b"no image")
        until(page, shown(1))
        until(page, status_has("no image that this browser can read"))
        until(page, "document.querySelector('#images img').naturalWidth === 2048")
        assert page.evaluate(
            "document.querySelector('#images img').src.startsWith('data:image/jpeg')"
        )
        assert not problems
        page.context.close()
