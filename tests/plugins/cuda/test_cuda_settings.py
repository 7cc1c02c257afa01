"""Environment variables of the CUDA backend."""

from __future__ import annotations

import pytest

from inl.errors import DeviceError
from inl_cuda.settings import WEIGHTS, requested_weights


@pytest.mark.parametrize(
    ("given", "found"), [(None, "dense"), ("", "dense"), ("packed", "packed")]
)
def test_requested_weights(monkeypatch, given, found):
    monkeypatch.delenv(WEIGHTS, raising=False)
    if given is not None:
        monkeypatch.setenv(WEIGHTS, given)
    assert requested_weights() == found


def test_an_unknown_value_is_refused(monkeypatch):
    monkeypatch.setenv(WEIGHTS, "tight")
    with pytest.raises(DeviceError, match=r"found 'tight', accepted: dense, packed"):
        requested_weights()
