"""Environment variables that choose one of several values."""

from __future__ import annotations

import pytest

from inl.errors import BackendUnavailable, DeviceError
from inl.plugin.environment import environment_choice


def test_the_first_value_is_the_default(monkeypatch):
    monkeypatch.delenv("INL_SPEED", raising=False)
    assert environment_choice("INL_SPEED", ("fast", "slow")) == "fast"
    monkeypatch.setenv("INL_SPEED", "")
    assert environment_choice("INL_SPEED", ("fast", "slow")) == "fast"
    monkeypatch.setenv("INL_SPEED", "slow")
    assert environment_choice("INL_SPEED", ("fast", "slow")) == "slow"


def test_another_value_is_refused_with_the_accepted_ones(monkeypatch):
    monkeypatch.setenv("INL_SPEED", "warp")
    message = r"environment variable INL_SPEED: found 'warp', accepted: fast, slow$"
    with pytest.raises(BackendUnavailable, match=message):
        environment_choice("INL_SPEED", ("fast", "slow"), BackendUnavailable)
    # An empty default is no value to give.
    with pytest.raises(DeviceError, match=message):
        environment_choice("INL_SPEED", ("", "fast", "slow"))
