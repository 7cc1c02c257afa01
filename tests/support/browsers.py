"""Pages of a server in a headless browser."""

from __future__ import annotations

import importlib.util
import shutil
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Debian's chromium and PyPI's playwright",
)


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
