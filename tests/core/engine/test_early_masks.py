"""Masks depend on the token before them, which may still be in flight."""

from __future__ import annotations

import pytest

from inl.engine import core
from inl.errors import RequestError
from soak import WrongText, soak


def test_a_mask_that_is_computed_a_position_too_late_is_detected(monkeypatch):
    monkeypatch.setattr(core, "are_ready", lambda plan, rows: True)
    with pytest.raises((WrongText, RequestError)):
        soak(0, 5_000, world_steps=200)
