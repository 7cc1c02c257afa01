"""Encoders against transformers: tiny models with random weights, on each backend."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from inl.config import EngineConfig
from inl.device import Device
from inl.engine.inference_engine import InferenceEngine
from inl.errors import CheckpointError, RequestError
from inl.executor.encoder_executor import load_encoder
from inl.executor.model_loader import open_model
from inl.runners.encoder_runner import EncoderRunner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BOUND = 1e-4
VOCAB = 90
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 80, "max_position_embeddings": 300,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
FAMILIES = {
    "Bert": {},
    "Roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "XLMRoberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "MPNet": {"pad_token_id": 1},
}
LENGTHS = (3, 17, 1, 140, 8, 40)
POOLINGS = ("cls_token", "mean_tokens", "lasttoken")


def saved(family, path, head="Model", **changes):
    """Save a random model; returns it and sequences of ids."""
    config = getattr(transformers, f"{family}Config")(
        **SIZES | FAMILIES[family] | changes
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{head}")(config).eval()
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=source)
            if name.endswith("bias") or "attention_bias" in name:
                weight.copy_(values)
            elif weight.ndim == 1:
                weight.copy_(1 + 0.3 * values)
            elif "embeddings" in name:
                weight.copy_(values)
            else:
                weight.copy_(2.5 * values / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return model, [
        torch.randint(3, VOCAB, (length,), generator=source).tolist()
        for length in LENGTHS
    ]


def hidden(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].double().numpy()


def modules(path, pooling, *, unit):
    """Write the files of sentence-transformers."""
    parts = ["Transformer", "Pooling", *["Normalize"] * unit]
    listed = [
        {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "",
         "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(parts)
    ]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(listed))
    folder = path / "1_Pooling"
    folder.mkdir(exist_ok=True)
    flags = {f"pooling_mode_{name}": name == pooling for name in POOLINGS}
    (folder / "config.json").write_text(json.dumps(flags))


def pooled(states, pooling):
    if pooling == "mean_tokens":
        return states.mean(0)
    return states[0 if pooling == "cls_token" else -1]


def engine_on(name, path, monkeypatch, **options):
    """An engine on a backend; those without a name of a device are put behind it."""
    config = EngineConfig(dtype="float32", token_budget=300, **options)
    if name in ("reference", "cpu"):
        return InferenceEngine(open_model(path), config=replace(config, backend=name))
    if name == "jax":
        pytest.importorskip("jax")
        monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
        backend = pytest.importorskip("inl_tpu.backend").TpuBackend(Device("tpu:0"))
    else:
        module = importlib.import_module("inl_cpu.torch_backend")
        backend = module.TorchCpuBackend(Device("cpu:0"))
    language = open_model(path)
    runner = EncoderRunner(load_encoder(language, backend, config))
    return InferenceEngine(language, config=config, runner=runner)


def worst(found, expected):
    """Largest difference of a row, relative to its largest number."""
    error = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
    return float(error.max())


BACKENDS = ["reference", "cpu", "torch", "jax"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family, backend, tmp_path, monkeypatch):
    model, texts = saved(family, tmp_path)
    rows = [hidden(model, ids).mean(0) for ids in texts]
    expected = np.stack([row / np.linalg.norm(row) for row in rows])
    with closing(engine_on(backend, tmp_path, monkeypatch)) as engine:
        found = engine.embed(texts)
        assert found.shape == (len(LENGTHS), 48)
        assert worst(found, expected) < BOUND
        # Alone and beside others a sequence has the same result.
        for index in (0, 3):
            assert worst(engine.embed(texts[index]), expected[index]) < BOUND
        # A sequence does see its own order, and no other sequence.
        assert worst(engine.embed([texts[1][::-1]]), expected[1:2]) > 10 * BOUND


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_modules_of_sentence_transformers(pooling, unit, tmp_path, monkeypatch):
    model, texts = saved("Bert", tmp_path)
    modules(tmp_path, pooling, unit=unit)
    expected = np.stack([pooled(hidden(model, ids), pooling) for ids in texts])
    if unit:
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        assert worst(engine.embed(texts), expected) < BOUND


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_that_classifies(family, backend, tmp_path, monkeypatch):
    model, texts = saved(family, tmp_path, "ForSequenceClassification", num_labels=5)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].numpy() for ids in texts]
    with closing(engine_on(backend, tmp_path, monkeypatch)) as engine:
        assert worst(engine.embed(texts), np.stack(logits)) < BOUND


def test_checkpoints_of_a_masked_model_with_a_prefix(tmp_path, monkeypatch):
    model, texts = saved("Bert", tmp_path, "ForMaskedLM")
    rows = np.stack([hidden(model.bert, ids).mean(0) for ids in texts])
    rows /= np.linalg.norm(rows, axis=-1, keepdims=True)
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        assert worst(engine.embed(texts), rows) < BOUND


def test_modules_that_are_not_known_are_refused(tmp_path):
    saved("Bert", tmp_path)
    modules(tmp_path, "weightedmean", unit=False)
    with pytest.raises(CheckpointError, match="found pooling"):
        open_model(tmp_path)
    listed = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"found a module .*Dense"):
        open_model(tmp_path)


def test_an_encoder_generates_no_text(tmp_path, monkeypatch):
    saved("Bert", tmp_path)
    with closing(engine_on("reference", tmp_path, monkeypatch)) as engine:
        with pytest.raises(RequestError, match="is an encoder and generates no text"):
            engine.generate([5, 6])
        with pytest.raises(RequestError, match="accepts 1 to 300"):
            engine.embed([[5] * 301])
        assert engine.embed([]).shape == (0, 48)


def test_an_encoder_runs_on_one_device_of_this_process(tmp_path):
    saved("Bert", tmp_path)
    worker = f"worker:{sys.executable}/reference"
    for options in ({"backend": worker}, {"tensor_parallel": 2}):
        with pytest.raises(RequestError, match="accepted: one device of this process"):
            InferenceEngine(open_model(tmp_path), config=EngineConfig(**options))
