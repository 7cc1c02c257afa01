"""Device of the Triton kernels under test; importing skips a module without one."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from depth import DEPTH

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if PLACE == "cpu" and not INTERPRETED:
    pytest.skip("no GPU; test_interpreted.py runs these", allow_module_level=True)

IS_SLOW = PLACE == "cpu" and DEPTH != "long"
"""Whether cases are left out, which take minutes in the interpreter."""

DTYPES = ("float32", "bfloat16") if IS_SLOW else ("float32", "bfloat16", "float16")

PDL = PLACE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
"""Whether the device supports programmatic dependent launch."""
