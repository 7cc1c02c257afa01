"""Layers that predict further tokens, against those of transformers."""

from __future__ import annotations

import importlib
import logging

import pytest

from eagle_heads import proposals
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
layers = pytest.importorskip("transformers.modeling_layers")
families = importlib.import_module("families")

LAYER = f"model.layers.{families.LAYERS}."
HIDDEN = families.SIZES["hidden_size"]
GAP = 1e-3
"""By which logits of drafts may be below the best ones."""


def with_layer(one):
    """Add a random layer after the last one to a model's files."""
    source = torch.Generator().manual_seed(4)
    path = one.path / "model.safetensors"
    tensors = safetensors.load_file(path)
    last = f"model.layers.{families.LAYERS - 1}."
    shapes = {
        LAYER + name.removeprefix(last): x.shape
        for name, x in tensors.items()
        if name.startswith(last)
    }
    shapes |= {
        f"{LAYER}{name}.weight": (HIDDEN,)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    shapes[f"{LAYER}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    tensors |= {
        name: families._random(name, shape, source, centered="")
        for name, shape in shapes.items()
    }
    # Copies of the model's own, which checkpoints have.
    tensors[f"{LAYER}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{LAYER}embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 0
    safetensors.save_file(tensors, path, {"format": "pt"})


class Oracle:
    """The drafts of transformers, recomputed without caches."""

    def __init__(self, path, kind, monkeypatch):
        model = getattr(transformers, f"{kind}ForCausalLM")
        patterns = [LAYER.replace(".", r"\.")]
        monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", patterns)
        self._model = model.from_pretrained(path, attn_implementation="eager").eval()
        self._layer = layers.MtpModel.from_pretrained(self._model).eval()

    @torch.no_grad()
    def gap(self, ids, answer):
        """By how much the logits of ``answer`` are below the best ones, at most."""
        found = self._model(torch.tensor([ids]), output_hidden_states=True)
        hidden, tokens, worst = found.hidden_states[-1][:, :-1], list(ids[1:]), 0.0
        for token in answer:
            inputs = torch.tensor([tokens])
            positions = torch.arange(1, len(tokens) + 1)[None]
            out = self._layer.forward_layer(0, hidden, positions, None, inputs)
            logits = self._model.lm_head(out[0, -1])
            worst = max(worst, float(logits.max() - logits[token]))
            hidden = torch.cat([hidden, out[:, -1:]], 1)
            tokens.append(token)
        return worst


@pytest.mark.parametrize(("name", "kind"), [
    ("glm4-moe", "Glm4Moe"),
    pytest.param("deepseek3", "DeepseekV3", marks=pytest.mark.full),
])  # fmt: skip
def test_drafts_are_those_of_transformers(name, kind, tmp_path, monkeypatch, caplog):
    one = families.make(name, tmp_path)
    with_layer(one)
    answers = []
    for options in ({}, {"speculation": "mtp", "max_drafts": 3}):
        config = EngineConfig(
            backend="reference", dtype="float64", context=64, max_batch=2,
            adaptive_drafts=False, **options,
        )  # fmt: skip
        with InferenceEngine(open_model(tmp_path), None, config) as engine:
            seen = proposals(engine) if options else []
            prompts = [one.ids[:17], one.ids[20:29]]
            done = engine.generate(prompts, max_tokens=8, ignore_eos=True)
            done += engine.generate(
                prompts, max_tokens=8, ignore_eos=True, temperature=0.8, seed=5
            )
        answers.append([each.token_ids for each in done])
    assert answers[0] == answers[1]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    oracle = Oracle(tmp_path, kind, monkeypatch)
    assert len(seen) > 6
    for text, answer in seen[::3]:
        assert oracle.gap(text, answer) < GAP, f"after {len(text)} tokens"
    text, answer = next(pair for pair in seen if len(pair[1]) > 1)
    assert oracle.gap(text, [answer[1], answer[0]]) > GAP
