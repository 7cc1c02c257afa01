"""Requests served by an engine core without a tokenizer."""

from __future__ import annotations

from inl.scheduling.request import Request
from toy_guide import ToyGuide


def served(core, prompts, count, grammar=None, **options):
    """Return finished requests of ``count`` tokens, with a grammar if there is one."""
    requests = []
    for ids in prompts:
        guide = grammar and ToyGuide(grammar)
        requests.append(Request(ids, max_tokens=count, guide=guide, **options))
    for request in requests:
        core.add(request)
    while core.has_work:
        for event in core.step():
            if event.error is not None:
                raise event.error
    return requests
