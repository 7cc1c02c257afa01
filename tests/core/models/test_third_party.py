"""An architecture from a plugin: one file with a model and a hook."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from inl.testing.tiny import plain_logits, tiny_llama

ACME = '''
"""Acme: a Llama whose embeddings are multiplied, with a bound on its logits."""

from dataclasses import dataclass, fields, replace

from inl.models import blocks, llama
from inl.models.config import number
from inl.plugin import hookimpl


@dataclass(frozen=True)
class AcmeConfig(llama.LlamaConfig):
    multiplier: float = 1.0


def config(hf):
    base = llama.config(hf)
    known = {field.name: getattr(base, field.name) for field in fields(base)}
    return AcmeConfig(**known, multiplier=number(hf, "embedding_multiplier", 1.0))


def embed(ops, c, w, step):
    carry = blocks.embed(ops, c, w.embed, step)
    return carry._replace(residual=carry.residual * c.multiplier)


def head(ops, c, w, carry, step):
    return ops.soft_cap(llama.head(ops, c, w, carry, step), cap=3.0)


MODEL = replace(llama.MODEL, config=config, embed=embed, head=head)


@hookimpl
def inl_register_models(register):
    register("AcmeForCausalLM", MODEL)
'''

SCRIPT = """
import sys
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import open_model

language = open_model(sys.argv[1])
config = EngineConfig(backend="reference", dtype="float64", context=64)
with InferenceEngine(language, config=config) as engine:
    print(list(engine.generate([5, 3, 88, 41], max_tokens=12).token_ids))
"""


@pytest.fixture
def folder(tmp_path):
    config, tensors = tiny_llama(np.random.default_rng(8), kv_heads=2)
    config |= {"architectures": ["AcmeForCausalLM"], "model_type": "acme"}
    config["embedding_multiplier"] = 3.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    words = {str(index): index for index in range(config["vocab_size"])}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    rules.save(str(tmp_path / "tokenizer.json"))
    return tmp_path, config, tensors


def answered(folder, site, plugins):
    (site / "acme.py").write_text(ACME)
    paths = [str(site), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": ":".join(paths), "INL_PLUGINS": plugins},
    )


def greedy(config, tensors, scale):
    table = "model.embed_tokens.weight"
    scaled = {**tensors, table: scale * tensors[table]}
    ids = [5, 3, 88, 41]
    for _ in range(12):
        ids.append(int(plain_logits(config, scaled, ids)[-1].argmax()))
    return ids[4:]


def test_a_plugin_adds_an_architecture(folder, tmp_path_factory):
    path, config, tensors = folder
    done = answered(path, tmp_path_factory.mktemp("site"), "acme")
    assert done.returncode == 0, done.stderr
    expected = greedy(config, tensors, 3.0)
    assert json.loads(done.stdout) == expected
    assert expected != greedy(config, tensors, 1.0)


def test_without_the_plugin_the_architecture_is_unknown(folder, tmp_path_factory):
    done = answered(folder[0], tmp_path_factory.mktemp("site"), "")
    assert done.returncode != 0
    assert "'AcmeForCausalLM'" in done.stderr
    assert "registered: AXK1ForCausalLM, " in done.stderr
    assert "ArceeForCausalLM, BambaForCausalLM, Bert" in done.stderr
