from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from byte_tokens import byte_rules
from inl.testing.tiny import tiny_llama

NO_PLUGINS = """
import importlib.metadata

importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
"""


@pytest.fixture(scope="session")
def no_plugins(tmp_path_factory):
    """A folder for PYTHONPATH that hides the installed plugins from ``inl``."""
    folder = tmp_path_factory.mktemp("no_plugins")
    (folder / "sitecustomize.py").write_text(NO_PLUGINS)
    return folder


@pytest.fixture
def inl(tmp_path, no_plugins):
    """Run ``inl`` in a fresh process, without installed plugins.

    The process can import the modules in ``tmp_path``.
    """

    def run(*words, env=None, **options):
        path = os.pathsep.join(
            filter(None, [str(tmp_path), str(no_plugins), os.environ.get("PYTHONPATH")])
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
            timeout=300,
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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny Llama over bytes, in the Hugging Face layout, with a chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-chat"
    folder.mkdir()
    config, tensors = tiny_llama(np.random.default_rng(11), vocab=258, kv_heads=2)
    config["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    rules = byte_rules()
    rules.add_special_tokens(["<begin>", "<end>"])
    rules.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<begin>{{ m.role[0] }}{{ m.content }}<end>{% endfor %}"
    )
    settings = json.dumps({"chat_template": template})
    (folder / "tokenizer_config.json").write_text(settings)
    return folder
