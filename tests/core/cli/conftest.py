from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def inl(tmp_path):
    """Run ``inl`` in a fresh process that sees the modules in ``tmp_path``."""

    def run(*words, env=None, **options):
        path = os.pathsep.join(
            filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
        )
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in ("INL_PLUGINS", "INL_DEBUG")
        }
        if "stdout" not in options:
            options["stdout"] = subprocess.PIPE
        return subprocess.run(
            [sys.executable, "-m", "inl", *words],
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**clean, "PYTHONPATH": path, **(env or {})},
            **options,
        )

    return run


@pytest.fixture
def plugin(tmp_path):
    """Write a module that the environment for ``inl`` then names as a plugin."""

    def write(source, name="fake_npu"):
        (tmp_path / f"{name}.py").write_text(source)
        return {"INL_PLUGINS": name}

    return write
