"""The page at ``/`` in a headless browser."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from browsers import needs_browser, status_has, until, visit
from http_servers import HashServer, ServerProcess
from inl.serve.web_page import FILES
from model_servers import ModelServer, Source


@pytest.fixture(scope="module")
def busy_server():
    with HashServer(max_batch=2, max_queue=2, seconds=0.01, api_keys=("k",)) as server:
        yield server


def test_the_page_and_its_files_need_no_key_and_ask_nobody_else(busy_server):
    texts = []
    for path in FILES:
        status, headers, text = busy_server.send("GET", path)
        assert status == 200
        assert "default-src 'self'" in headers["content-security-policy"]
        texts.append(text)
    assert not any(b"http://" in text or b"https://" in text for text in texts)


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
def test_sampling_is_the_models_unless_it_is_set(browser):
    with HashServer(max_batch=2) as server:
        server.engine.sampling_defaults = {"temperature": 0.3}
        page, problems, _ = visit(browser, server)
        until(page, "document.getElementById('temperature').placeholder === '0.3'")
        bodies = []
        page.on("request", lambda request: bodies.append(request.post_data))
        page.fill("#max_tokens", "2")
        for top_p in ("", "0.5"):
            page.fill("#top_p", top_p)
            page.fill("#prompt", "Hello")
            page.press("#prompt", "Enter")
            until(page, status_has("2 tokens"))
            until(page, status_has("ms"))
            page.evaluate("document.getElementById('status').textContent = ''")
        first, second = (json.loads(body) for body in bodies if body)
        assert not {"temperature", "top_p"} & first.keys()
        assert second["top_p"] == 0.5
        assert not problems
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


WIDE = "\n".join(
    [
        "# A title",
        "A [link](https://example.org/a_b) and " + "long" * 60,
        "",
        "| a | b | c | d | e | f |",
        "|---|---|---|---|---|---|",
        f"| {'cell' * 20} | 2 | 3 | 4 | 5 | 6 |",
        "",
        "```python",
        "x = 1; " * 40,
        "```",
    ]
)
HOSTILE = """<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script>
[a](javascript:window.harmed=1) ![b](https://example.org/b.png) [c](data:text/html,x)
"""
DRAWN = """([role, content]) => {
    chat.messages = [{ role, content }];
    chat.title = content;
    chats.save(chat);
    render();
}"""


@needs_browser
@pytest.mark.parametrize("width", [320, 360, 390, 430])
def test_a_phone_shows_the_whole_width(browser, busy_server, width):
    size = {"width": width, "height": 640}
    page, problems, _ = visit(
        browser, busy_server, viewport=size, has_touch=True, is_mobile=True
    )
    page.evaluate(DRAWN, ["assistant", WIDE])
    assert page.locator("#send").bounding_box()["height"] >= 40
    assert not page.locator("#side").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.tap("#toggle")
    assert page.locator("#side").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    inner = "document.querySelector('main')"
    assert page.evaluate(f"{inner}.scrollWidth <= {inner}.clientWidth")
    assert not problems
    page.context.close()


MARKDOWN = {
    "a *b* **c** `d*e*`": "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code></p>",
    "a_b_c 2 * 3 * 4": "<p>a_b_c 2 * 3 * 4</p>",
    "**a *b* c** ***d***": "<p><strong>a <em>b</em> c</strong> "
    "<strong><em>d</em></strong></p>",
    "# a\nb": "<h2>a</h2><p>b</p>",
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n\n- b\n\nc": "<ul><li>a</li><li>b</li></ul><p>c</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "---": "<hr>",
    "<b>a</b>": "<p>&lt;b&gt;a&lt;/b&gt;</p>",
    "[a](javascript:b)": "<p>[a](javascript:b)</p>",
    "\\*a\\*": "<p>*a*</p>",
}


@needs_browser
def test_markdown_is_drawn_and_brings_no_markup(browser, busy_server):
    page, problems, urls = visit(browser, busy_server)
    drawn = """(text) => {
        const box = document.createElement("div");
        box.append(markdown(text));
        return box.innerHTML;
    }"""
    assert {text: page.evaluate(drawn, text) for text in MARKDOWN} == MARKDOWN
    page.evaluate(DRAWN, ["assistant", WIDE])
    assert page.locator("#log td").count() == 6
    assert page.locator("#log pre code").inner_text() == "x = 1; " * 40
    assert page.locator("#log a").get_attribute("href") == "https://example.org/a_b"
    page.evaluate(DRAWN, ["assistant", HOSTILE])
    links = page.locator("#log a").evaluate_all("(all) => all.map((each) => each.href)")
    assert links == ["https://example.org/b.png"]  # a link, not fetched
    assert page.locator("#log img, #log script").count() == 0
    assert page.evaluate("window.harmed") is None
    assert not problems
    assert not any("example.org" in url for url in urls)
    page.context.close()


RUNS = ("*", "[", "`", "> ", "- ", "_a", "|", "# ", "h", " ", "- - ", "[a](")


@needs_browser
@pytest.mark.parametrize("piece", RUNS)
def test_long_runs_of_marks_are_drawn_as_text(browser, busy_server, piece):
    page, problems, _ = visit(browser, busy_server)
    text = piece * 40_000
    length = page.evaluate("(text) => markdown(text).textContent.length", text)
    assert length <= len(text)
    assert not problems
    page.context.close()


def ask(page, text, tokens=12):
    page.fill("#key", "k")
    page.press("#key", "Tab")
    page.fill("#max_tokens", str(tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    until(page, status_has(f"{tokens} tokens"))
    until(page, "document.getElementById('stop').disabled")


@needs_browser
def test_a_conversation_and_its_parameters_survive_a_reload(browser, busy_server):
    page, problems, _ = visit(browser, busy_server)
    page.fill("#system", "Be brief.")
    ask(page, "First of all")
    answer = page.locator(".message.assistant").inner_text()
    page.reload()
    assert page.locator(".message.user").inner_text() == "First of all"
    assert page.locator(".message.assistant").inner_text() == answer
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("#max_tokens") == "12"
    page.click("#clear")
    assert page.locator(".message").count() == 0
    ask(page, "Second")
    assert page.locator("#chats .title").all_inner_texts() == ["Second", "First of all"]
    page.once("dialog", lambda dialog: dialog.accept("Other name"))
    page.click("[aria-label='Rename First of all']")
    page.click("text=Other name")
    assert page.locator(".message.user").inner_text() == "First of all"
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Delete Other name']")
    assert page.locator("#chats .title").all_inner_texts() == ["Second"]
    assert not problems
    page.context.close()


@needs_browser
def test_a_cut_answer_says_so_and_goes_on(browser, busy_server):
    page, problems, _ = visit(browser, busy_server)
    ask(page, "Hello")
    assert "stopped at 12 tokens" in page.locator("#status").inner_text()
    assert "stopped at 12 tokens" in page.locator(".cut").inner_text()
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json))
    page.click("text=Continue")
    until(page, "document.getElementById('stop').disabled")
    sent = next(body for body in bodies if body)
    assert sent["continue_final_message"] is True
    assert sent["messages"][-1]["role"] == "assistant"
    assert page.locator(".message.assistant").count() == 1
    text = page.evaluate("chat.messages[1].content")
    assert text.startswith(sent["messages"][-1]["content"])
    assert len(text) > len(sent["messages"][-1]["content"])
    assert page.locator("#status").get_attribute("class") == ""
    assert not problems
    page.context.close()


@needs_browser
def test_a_message_is_edited_and_an_answer_asked_again(browser, busy_server):
    page, problems, _ = visit(browser, busy_server)
    ask(page, "One")
    ask(page, "Two", tokens=5)
    page.locator("[aria-label='Edit message']").first.click()
    page.fill("[aria-label='Edited message']", "Three")
    page.click("text=Send again")
    until(page, "document.getElementById('stop').disabled")
    assert page.locator(".message.user").all_inner_texts() == ["Three"]
    assert page.locator(".message.assistant").count() == 1
    page.click("text=Regenerate")
    until(page, "document.getElementById('stop').disabled")
    assert page.locator(".message.assistant").count() == 1
    assert not problems
    page.context.close()


@needs_browser
def test_a_conversation_is_exported(browser, busy_server):
    page, problems, _ = visit(browser, busy_server)
    page.fill("#system", "Be brief.")
    ask(page, "What is it?")
    with page.expect_download() as download:
        page.click("#export-json")
    assert download.value.suggested_filename == "What-is-it-.json"
    exported = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert exported["parameters"]["system"] == "Be brief."
    assert [each["role"] for each in exported["messages"]] == ["user", "assistant"]
    with page.expect_download() as download:
        page.click("#export-md")
    text = Path(download.value.path()).read_text("utf-8")
    assert text.startswith("# What is it?\n\n## system\n\nBe brief.\n\n## user\n")
    assert not problems
    page.context.close()


@needs_browser
def test_refusals_say_what_to_do(browser, busy_server):
    page, problems, _ = visit(browser, busy_server)
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    until(page, status_has("enter the API key"))
    assert page.evaluate("document.activeElement.id") == "key"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=503,
            headers={"retry-after": "7"},
            json={"error": {"message": "the queue is full"}},
        ),
    )
    page.click("text=Try again")
    until(page, status_has("the queue is full: try again in 7 s"))
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            headers={"content-type": "text/event-stream"},
            body='data: {"choices": [{"delta": {"content": "half"}}]}\n\n',
        ),
    )
    page.click("text=Try again")
    until(page, status_has("the connection ended before the answer did"))
    assert page.locator(".message.assistant").inner_text() == "half"
    assert "not whole" in page.locator(".cut").inner_text()
    assert not problems
    page.context.close()


@needs_browser
def test_the_oldest_conversations_make_room(browser, busy_server):
    page, problems, _ = visit(browser, busy_server)
    kept = page.evaluate("""() => {
        for (let at = 0; at < 60; at += 1) {
            const made = { ...chats.create(), title: `t${at}` };
            made.messages.push({ role: "user", content: "x".repeat(200_000) });
            if (!chats.save(made)) return null;
            const later = { ...made, changed: at };
            chats.write(`inl-chat:${made.id}`, later);
        }
        return chats.list().map((each) => each.title);
    }""")
    assert kept[0] == "t59"
    assert 10 < len(kept) <= 50
    assert not problems
    page.context.close()


SIZES = {
    "light": {"viewport": {"width": 1100, "height": 700}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1100, "height": 700}, "color_scheme": "dark"},
    "tablet": {"viewport": {"width": 768, "height": 900}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 360, "height": 640}, "color_scheme": "light"},
}


@needs_browser
def test_the_chosen_model_answers(browser):
    sources = [Source("first"), Source('sec"ond')]
    with ModelServer(*sources) as server:
        page, problems, _ = visit(browser, server)
        until(page, "document.getElementById('model').options.length === 2")
        page.select_option("#model", 'sec"ond')
        until(page, status_has("is not loaded"))
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
        page.fill("#prompt", "Say blue twenty times: blue blue blue blue blue blue")
        page.press("#prompt", "Enter")
        until(page, f"Number({figure}.querySelector('span').textContent) > 0")
        assert page.evaluate(f"{figure}.hidden") is False
        assert not problems
        page.context.close()
    page, _, _ = visit(browser, SimpleNamespace(url=server_url))
    page.wait_for_selector("figure polyline[points]", state="attached")
    assert page.evaluate(f"{figure}.hidden") is True
    page.context.close()
