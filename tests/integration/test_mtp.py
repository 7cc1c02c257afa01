"""Layers that predict further tokens, against those of transformers."""

from __future__ import annotations

import importlib
import logging

import numpy as np
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
    chosen = [name for name in tensors if ".indexer." in name]
    if chosen:  # of the last layer that has an indexer, which this layer has too
        last = max(chosen).split("self_attn")[0]
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


class SparseOracle:
    """Logits of a layer whose attention an indexer chooses for, in float64.

    The decoder layer is that of transformers, which has no such layers here: a model
    of one layer more. What is around it is computed by the equations of DeepSeek-V3,
    from the tensors of the files. swapped: whether embedding and hidden state change
    places, a fault.
    """

    def __init__(self, path, kind, *, swapped=False):
        config = transformers.AutoConfig.from_pretrained(path)
        for name in ("mlp_layer_types", "indexer_types"):
            if hasattr(config, name):
                more = "full" if name == "indexer_types" else "sparse"
                setattr(config, name, [*getattr(config, name), more])
        if getattr(config, "layer_types", None):
            config.layer_types = [*config.layer_types, config.layer_types[-1]]
        config.num_hidden_layers += 1
        model = getattr(transformers, f"{kind}ForCausalLM")
        self._model = model.from_pretrained(
            path, config=config, attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip
        self._model = self._model.eval().double()
        found = safetensors.load_file(path / "model.safetensors")
        self._w = {name: x.double() for name, x in found.items()}
        self._swapped = swapped

    def _norm(self, x, name):
        eps = self._model.config.rms_norm_eps
        weight = self._w[f"{name}.weight"]
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def _hidden(self, ids):
        """The model's normalized hidden states, [1, T, H], without the last layer."""
        body, seen = self._model.model, []
        hook = body.layers[-1].register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        body(torch.tensor([ids]))
        hook.remove()
        return self._norm(seen[0], "model.norm")

    def _layer(self, x):
        """The last layer's output of [1, T, H], at positions from 1 on."""
        body, count = self._model.model, x.shape[1]
        positions = torch.arange(1, count + 1)[None]
        mask = torch.full((count, count), float("-inf"), dtype=x.dtype).triu(1)
        out = body.layers[-1](
            x, attention_mask=mask[None, None], position_ids=positions,
            position_embeddings=body.rotary_emb(x, position_ids=positions),
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def logits(self, ids, answer):
        """Logits of the drafts ``answer`` after ``ids``, [len(answer), V]."""
        given, tokens, found = self._hidden(ids)[:, :-1], list(ids[1:]), []
        for token in answer:
            embedded = self._w["model.embed_tokens.weight"][tokens][None]
            parts = [
                self._norm(embedded, f"{LAYER}enorm"),
                self._norm(given, f"{LAYER}hnorm"),
            ]
            parts = parts[::-1] if self._swapped else parts
            joined = torch.cat(parts, -1) @ self._w[f"{LAYER}eh_proj.weight"].T
            out = self._norm(self._layer(joined)[:, -1:], f"{LAYER}shared_head.norm")
            found.append((out[0, 0] @ self._w["lm_head.weight"].T).numpy())
            given = torch.cat([given, out], 1)
            tokens.append(token)
        return np.array(found)


@pytest.mark.parametrize(("name", "kind"), [
    ("deepseek3.2", "DeepseekV32"),
    pytest.param("glm5", "GlmMoeDsa", marks=pytest.mark.full),
])  # fmt: skip
def test_logits_with_an_indexer_are_those_of_the_equations(name, kind, tmp_path):
    one = families.make(name, tmp_path, num_nextn_predict_layers=1)
    with_layer(one)
    prompts, answers = [one.ids[:17], one.ids[20:29]], []
    for options in ({"speculation": None}, {"speculation": "mtp", "max_drafts": 3}):
        config = EngineConfig(
            backend="reference", dtype="float64", context=64, max_batch=1,
            adaptive_drafts=False, **options,
        )  # fmt: skip
        with InferenceEngine(open_model(tmp_path), None, config) as engine:
            seen = logits_of_drafts(engine) if engine.speculation else []
            done = engine.generate(prompts, max_tokens=8, ignore_eos=True)
            done += engine.generate(
                prompts, max_tokens=8, ignore_eos=True, temperature=0.8, seed=5
            )
        answers.append([each.token_ids for each in done])
    assert answers[0] == answers[1]
    oracle, wrong = (
        SparseOracle(tmp_path, kind),
        SparseOracle(tmp_path, kind, swapped=True),
    )
    assert len(seen) > 6
    assert max(len(text) for text, *_ in seen) > 2 * one_choice(tmp_path)
    for text, answer, logits in seen[::3]:
        expected = oracle.logits(text, answer)[: len(logits)]
        assert logits == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert logits != pytest.approx(wrong.logits(text, answer)[: len(logits)], 1e-3)


def one_choice(path):
    """The tokens that a query attends to."""
    return transformers.AutoConfig.from_pretrained(path).index_topk


def logits_of_drafts(engine):
    """Return a list that gets the text, drafts and their logits of each proposal."""
    drafter, seen, rows = engine.speculation.drafter, [], []
    head = drafter._executor
    compute, propose = head.draft, drafter.propose

    def draft(*args, **options):
        tokens, out = compute(*args, **options)
        rows.append((tokens, head.backend.numpy(out).data.copy()))
        return tokens, out

    def proposed(queries):
        first = len(rows) - 1
        found = propose(queries)
        weight = head.backend.numpy(head.loaded.weights.head.weight).data
        for query, answer in zip(queries, found, strict=True):
            if len(queries) == 1 and answer:
                outs = [out[0] for _, out in rows[first:]]
                seen.append(
                    (list(query.tokens), list(answer), np.array(outs) @ weight.T)
                )
        return found

    head.draft, drafter.propose = draft, proposed
    return seen


@pytest.mark.parametrize(("name", "kind"), [
    ("glm4-moe", "Glm4Moe"),
    pytest.param("deepseek3", "DeepseekV3", marks=pytest.mark.full),
])  # fmt: skip
def test_drafts_are_those_of_transformers(name, kind, tmp_path, monkeypatch, caplog):
    one = families.make(name, tmp_path)
    with_layer(one)
    answers = []
    for options in ({"speculation": None}, {"speculation": "mtp", "max_drafts": 3}):
        config = EngineConfig(
            backend="reference", dtype="float64", context=64, max_batch=2,
            adaptive_drafts=False, **options,
        )  # fmt: skip
        with InferenceEngine(open_model(tmp_path), None, config) as engine:
            seen = proposals(engine) if engine.speculation else []
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
