"""The page at ``/`` in a headless browser."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from http_servers import HashServer, ServerProcess
from model_servers import ModelServer, Source

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Debian's chromium and PyPI's playwright",
)


@pytest.fixture(scope="module")
def busy_server():
    with HashServer(max_batch=2, max_queue=2, seconds=0.01, api_keys=("k",)) as server:
        yield server


def test_the_page_and_its_files_need_no_key_and_ask_nobody_else(busy_server):
    texts = []
    for path in ("/", "/page.js", "/page.css"):
        status, headers, text = busy_server.send("GET", path)
        assert status == 200
        assert "default-src 'self'" in headers["content-security-policy"]
        texts.append(text)
    assert not any(b"http://" in text or b"https://" in text for text in texts)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


def visit(browser, server, **options):
    context = browser.new_context(**options)
    context.set_default_timeout(300_000)
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    foreign = []
    page.on("request", lambda request: foreign.append(request.url))
    page.goto(server.url)
    return page, problems, foreign


def until(page, expression):
    """Wait until an expression is true; the page's policy forbids eval."""
    deadline = time.monotonic() + 300
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def status_has(text):
    return f"document.getElementById('status').textContent.includes('{text}')"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_conversation_by_keyboard(browser, busy_server, scheme):
    page, problems, urls = visit(browser, busy_server, color_scheme=scheme)
    until(page, "document.getElementById('status').className === 'bad'")
    page.fill("#key", "k")
    page.press("#key", "Tab")
    until(page, "document.getElementById('model').textContent === 'hash'")
    page.fill("#max_tokens", "20")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    until(page, status_has("ms"))
    assert page.locator(".message").count() == 2
    assert page.locator(".message.user").inner_text() == "Hello"
    assert page.locator(".message.assistant").inner_text()
    assert "20 tokens" in page.locator("#status").inner_text()
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.wait_for_selector("figure polyline[points]", state="attached")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark[4:-1].split(","))) < 200) == (scheme == "dark")
    assert not problems
    assert all(url.startswith((busy_server.url, "data:")) for url in urls)
    page.context.close()


@needs_browser
def test_stopping_ends_the_request(browser, busy_server):
    page, problems, _ = visit(browser, busy_server)
    page.fill("#key", "k")
    page.fill("#max_tokens", "900")
    page.fill("#prompt", "Hello")
    with busy_server.paused() as gate:
        gate.hold_after(400)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".message.assistant:has-text('a')")
        page.keyboard.press("Escape")
        until(page, status_has("stopped"))
    busy_server.wait_idle()
    assert not problems
    page.context.close()


@needs_browser
def test_a_phone_shows_the_whole_width(browser, busy_server):
    size = {"width": 360, "height": 640}
    page, problems, _ = visit(browser, busy_server, viewport=size, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#send").bounding_box()["height"] >= 40
    assert not page.locator("#side").is_visible()
    page.tap("#toggle")
    assert page.locator("#side").is_visible()
    assert not problems
    page.context.close()


SIZES = {
    "light": {"viewport": {"width": 1100, "height": 700}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1100, "height": 700}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 640}, "color_scheme": "light"},
}


@needs_browser
def test_the_chosen_model_answers(browser):
    sources = [Source("first"), Source('sec"ond')]
    with ModelServer(*sources) as server:
        page, problems, _ = visit(browser, server)
        until(page, "document.getElementById('model').options.length === 2")
        page.select_option("#model", 'sec"ond')
        page.fill("#max_tokens", "5")
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        until(page, status_has("5 tokens"))
        page.wait_for_selector("figure polyline[points]", state="attached")
        assert server.is_loaded() == {"first": False, 'sec"ond': True}
        assert not problems
        page.context.close()


@needs_browser
@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
def test_screenshots_of_a_conversation(browser, server_url, name, tmp_path):
    """Writes those of the documentation into the folder INL_SCREENSHOTS, if set."""
    page, problems, _ = visit(browser, SimpleNamespace(url=server_url), **SIZES[name])
    # The fields are hidden on a phone.
    page.evaluate("document.getElementById('temperature').value = 0")
    page.evaluate("document.getElementById('max_tokens').value = 60")
    page.fill("#prompt", "Why is the sky blue?")
    page.press("#prompt", "Enter")
    until(page, status_has("tokens/s"))
    until(page, status_has("ms"))
    path = Path(os.environ.get("INL_SCREENSHOTS", tmp_path)) / f"page-{name}.png"
    page.screenshot(path=path)
    assert 5_000 < path.stat().st_size < 200_000
    assert not problems
    page.context.close()


@needs_browser
@pytest.mark.full
def test_the_share_of_accepted_drafts_is_a_chart(browser, server_url):
    figure = "[...document.querySelectorAll('figure')].find((each) => "
    figure += "each.textContent.startsWith('Drafts accepted'))"
    options = ("--speculation", "ngram", "--no-adaptive-drafts")
    with ServerProcess(*options) as server:
        page, problems, _ = visit(browser, server)
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "60")
        page.fill("#prompt", "Repeat: red green blue red green blue red green")
        page.press("#prompt", "Enter")
        until(page, f"Number({figure}.querySelector('span').textContent) > 0")
        assert page.evaluate(f"{figure}.hidden") is False
        assert not problems
        page.context.close()
    page, _, _ = visit(browser, SimpleNamespace(url=server_url))
    page.wait_for_selector("figure polyline[points]", state="attached")
    assert page.evaluate(f"{figure}.hidden") is True
    page.context.close()
