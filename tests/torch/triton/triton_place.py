"""Device of the Triton kernels under test; importing skips a module without one."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if PLACE == "cpu" and not INTERPRETED:
    pytest.skip("no GPU; test_interpreted.py runs these", allow_module_level=True)

PDL = PLACE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
"""Whether the device supports programmatic dependent launch."""
