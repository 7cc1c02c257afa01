"""Fixtures of engines: their threads, and their exchanges of caches."""

from __future__ import annotations

import pytest

from inl.engine import link_port, scheduler_setup, step_loop
from inl.kv_transfer import link

PATIENCE = 300.0
"""Seconds, of a machine that does other work too."""


@pytest.fixture(autouse=True)
def short_idle(monkeypatch):
    """Threads without requests end soon: tests wait for that."""
    monkeypatch.setattr(step_loop, "IDLE_SECONDS", 0.01)


@pytest.fixture
def patient_links(monkeypatch):
    """Connections between engines wait for a busy machine."""
    monkeypatch.setattr(link_port, "HELLO_SECONDS", PATIENCE)
    for name in ("CONNECT_SECONDS", "HELLO_SECONDS"):
        monkeypatch.setattr(link, name, PATIENCE)


@pytest.fixture(params=["blocks", "state"])
def has_state(request, monkeypatch):
    """Whether every token changes state of the model, beside its blocks."""
    recurrent = request.param == "state"
    monkeypatch.setattr(scheduler_setup, "is_recurrent", lambda _: recurrent)
    return recurrent
