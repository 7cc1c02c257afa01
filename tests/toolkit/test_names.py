"""The names of the toolkit in ``inl``: the same objects, and no framework."""

from __future__ import annotations

import subprocess
import sys

import inl

NAMES = sorted({*inl.LAZY, *inl.LAZY_MODULES} - {*inl.__all__})
EVERY_MODULE = """
import sys
from importlib import import_module
from pkgutil import walk_packages

import inl

path = import_module("inl_toolkit").__path__
names = [part.name for part in walk_packages(path, "inl.")]
for name in reversed(names):
    import_module(name)
for name in names:
    assert sys.modules[name] is sys.modules[f"inl_toolkit{name[3:]}"], name
print(*names)
"""


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_no_name_brings_a_framework():
    uses = "; ".join(f"inl.{name}" for name in NAMES)
    loaded = run(f"import inl, sys; {uses}; print(*sys.modules)")
    assert "inl_toolkit.nn" in loaded
    assert loaded.isdisjoint(["torch", "jax", "triton"])


def test_every_name_is_there():
    assert set(NAMES) <= set(dir(inl))
    for name in NAMES:
        assert getattr(inl, name).__name__.rpartition(".")[2] == name


def test_every_module_is_the_same_under_both_names():
    """Another copy would have classes and settings of its own."""
    assert run(EVERY_MODULE) >= {"inl.nn.losses", "inl.kernels.tpu.tpu_custom_call"}
