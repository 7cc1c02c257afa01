"""EAGLE-3 heads change no output of eager torch, and draft as they should."""

from __future__ import annotations

import importlib

import pytest

from eagle_heads import PLAIN_REQUESTS, assert_backend_drafts
from inl.device import Device

pytest.importorskip("torch")
TorchCpuBackend = importlib.import_module("inl_cpu.torch_backend").TorchCpuBackend


def test_a_head_changes_no_output(tmp_path):
    requests = [PLAIN_REQUESTS[at] for at in (0, 1, 2)]
    assert_backend_drafts(TorchCpuBackend(Device("cpu")), tmp_path, requests)
