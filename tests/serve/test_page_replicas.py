"""The table of engines on the page at ``/``, in a browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from browsers import needs_browser, visit
from browsers import until as until_page
from fleets import LONG, TEXT, Fleet, HeldEngine
from http_servers import HashServer
from waiting import until

ROWS = "[...document.querySelectorAll('#replica-rows tr')]"
CELLS = f"{ROWS}.map((row) => [...row.children].map((cell) => cell.innerText))"
TITLE = "document.getElementById('replicas-title').textContent"
ADMIN = {"authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def engines():
    with HeldEngine(max_batch=4) as one, HeldEngine(max_batch=4) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def fleet(engines):
    addresses = [each.address for each in engines]
    with Fleet(addresses, config={"admin_keys": ("operator",)}) as fleet:
        until(lambda: len(fleet.client.members.by_number) == 2)
        yield fleet


@needs_browser
def test_engines_are_shown_as_they_are(browser, fleet, engines):
    page, problems, urls = visit(browser, fleet)
    one, two = (each.address for each in engines)
    until_page(page, f"{TITLE} === '2 of 2 engines are ready'")
    for _ in range(2):
        assert fleet.send("POST", TEXT, {**LONG, "max_tokens": 2})[0] == 200
    until_page(page, f"{CELLS}.some((each) => each[3] === '48 %')")
    engine = fleet.send("GET", "/load")[2]["replicas"]
    (busy,) = [each["address"] for each in engine if each["prompt_tokens"]]
    other = two if busy == one else one
    body = {"address": other}
    assert fleet.send("POST", "/fleet/drain", body, ADMIN)[0] == 200
    until_page(page, f"{TITLE} === '1 of 2 engines are ready'")
    cells = {name.split("\n")[0]: rest for name, *rest in page.evaluate(CELLS)}
    assert cells[busy] == ["ready", "0 of 4", "48 %"]
    assert cells[other] == ["draining\nis drained by an operator", "0 of 4", ""]
    assert fleet.send("POST", "/fleet/add", body, ADMIN)[0] == 200
    until_page(page, f"{TITLE} === '2 of 2 engines are ready'")
    assert not problems
    assert all(url.startswith((fleet.url, "data:")) for url in urls)
    page.context.close()


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 1100])
def test_the_table_fits(browser, fleet, width):
    size = {"width": width, "height": 640}
    page, problems, _ = visit(browser, fleet, viewport=size)
    if width < 800:
        page.click("#toggle")
    until_page(page, f"{ROWS}.length === 2")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#replicas table").bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= width
    assert not problems
    page.context.close()


MANY = f"""() => {{ showReplicas([...Array(10_000).keys()].map((at) => ({{
    address: `10.0.${{at >> 8}}.${{at & 255}}:7000`, device: "cuda:0", reason: "",
    state: at === 7777 ? "silent" : "ready", slowness: at === 8888 ? 2.5 : 1,
    open: at % 32, places: 32, prompt_tokens: 0, cached_tokens: 0,
}}))); return [{TITLE}, {CELLS}]; }}"""
"""At once: the page may read the state of its own engines at any time."""


@needs_browser
def test_of_many_those_with_a_problem_come_first(browser, fleet):
    page, problems, _ = visit(browser, fleet)
    until_page(page, f"{ROWS}.length === 2")
    title, cells = page.evaluate(MANY)
    assert title == "9999 of 10000 engines are ready, 50 shown"
    assert len(cells) == 50
    assert [each[1] for each in cells[:3]] == [
        "silent", "ready, 2.5 times slower", "ready",
    ]  # fmt: skip
    assert {each[2] for each in cells[2:]} == {"31 of 32"}
    assert not problems
    page.context.close()


@needs_browser
def test_one_engine_has_no_table(browser):
    with HashServer(max_batch=2) as server:
        page, problems, urls = visit(browser, server)
        page.wait_for_selector("figure polyline[points]", state="attached")
        page.wait_for_selector("figure polyline[points*=' ']", state="attached")
        assert page.evaluate("document.getElementById('replicas').hidden")
        assert [url for url in urls if url.endswith("/load")] == [f"{server.url}/load"]
        assert not problems
        page.context.close()


@needs_browser
@pytest.mark.full
@pytest.mark.parametrize("name", ["light", "dark"])
def test_screenshots_of_the_table(browser, fleet, name, tmp_path):
    """Writes that of the documentation into the folder INL_SCREENSHOTS, if set."""
    size = {"width": 1100, "height": 900}
    page, problems, _ = visit(browser, fleet, viewport=size, color_scheme=name)
    until_page(page, f"{ROWS}.length === 2")
    folder = Path(os.environ.get("INL_SCREENSHOTS", tmp_path))
    path = folder / f"page-replicas-{name}.png"
    page.screenshot(path=path)
    assert 5_000 < path.stat().st_size < 200_000
    assert not problems
    page.context.close()
