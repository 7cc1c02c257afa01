"""Random EAGLE-3 heads of tiny models, and what they predict, in plain float64.

:class:`PlainHead` uses none of the ops and models under test.
"""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from drafted import REQUESTS, outputs, told
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.speculation.setup import with_draft_head
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

TAPS, VOCAB = (0, 1, 2), 96
PLAIN_REQUESTS = [
    {name: value for name, value in options.items() if name != "stop"}
    for options in REQUESTS
]
"""Requests that need no tokenizer."""


def random_head(rng, target, *, draft_vocab=None, heads=4, inner=64, taps=TAPS):
    """Config and tensors of a head of a tiny Llama with config ``target``."""
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    size = draft_vocab or vocab
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)},
    }

    def matrix(rows, columns):
        return (1.4 * rng.standard_normal((rows, columns)) / columns**0.5).astype("f4")

    def norm():
        return (1 + 0.3 * rng.standard_normal(hidden)).astype("f4")

    at = "midlayer."
    tensors = {
        "fc.weight": matrix(hidden, len(taps) * hidden),
        f"{at}hidden_norm.weight": norm(),
        f"{at}input_layernorm.weight": norm(),
        f"{at}post_attention_layernorm.weight": norm(),
        f"{at}self_attn.q_proj.weight": matrix(heads * 8, 2 * hidden),
        f"{at}self_attn.k_proj.weight": matrix(heads * 4, 2 * hidden),
        f"{at}self_attn.v_proj.weight": matrix(heads * 4, 2 * hidden),
        f"{at}self_attn.o_proj.weight": matrix(hidden, heads * 8),
        f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
        f"{at}mlp.up_proj.weight": matrix(inner, hidden),
        f"{at}mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(size, hidden),
    }
    if size != vocab:
        kept = np.sort(rng.choice(vocab, size, replace=False))
        tensors["d2t"] = kept - np.arange(size)
        tensors["t2d"] = np.isin(np.arange(vocab), kept)
    return config, tensors


def written(folder, config, tensors):
    """Write a head in its public layout; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _norm(x, weight):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def _silu(x):
    return x / (1 + np.exp(-x))


def _turned(x, positions):
    """Rotate [T, heads, d] by its positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _attended(x, w, at, dim=8):
    """Causal attention of the rows of ``x``, without a residual."""
    parts = [x @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv"]
    q, k, v = (part.reshape(len(x), -1, dim) for part in parts)
    positions = np.arange(len(x))
    q, k = _turned(q, positions), _turned(k, positions)
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) / dim**0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
    return mixed.reshape(len(x), -1) @ w[f"{at}self_attn.o_proj.weight"].T


def _fed_forward(x, w, at):
    gate = _silu(x @ w[f"{at}mlp.gate_proj.weight"].T)
    up = x @ w[f"{at}mlp.up_proj.weight"].T
    return (gate * up) @ w[f"{at}mlp.down_proj.weight"].T


class PlainHead:
    """A head and its target in float64, without caches.

    shift: positions by which the hidden states are displaced, a fault.
    """

    def __init__(self, target, head, *, taps=TAPS, shift=0):
        self._target, self._head = (
            {name: np.asarray(x, np.float64) for name, x in tensors.items()}
            for tensors in (target[1], head[1])
        )
        self._layers, self._taps = target[0]["num_hidden_layers"], taps
        self._shift = shift

    def hidden(self, ids):
        """Inputs of the tapped layers, [len(ids), taps * H]."""
        w, seen = self._target, []
        x = w["model.embed_tokens.weight"][list(ids)]
        for index in range(self._layers):
            if index in self._taps:
                seen.append(x)
            at = f"model.layers.{index}."
            x = x + _attended(_norm(x, w[f"{at}input_layernorm.weight"]), w, at)
            normed = _norm(x, w[f"{at}post_attention_layernorm.weight"])
            x = x + _fed_forward(normed, w, at)
        return np.roll(np.concatenate(seen, -1), self._shift, axis=0)

    def outputs(self, ids, count, draft=None):
        """Output vectors of ``count`` predictions after ``ids``, [count, H].

        draft: the tokens that are fed back, by default the predictions themselves.
        """
        w, at = self._head, "midlayer."
        given = self.hidden(ids)[: len(ids) - 1] @ w["fc.weight"].T
        tokens, found = list(ids[1:]), []
        for step in range(count):
            table = self._target["model.embed_tokens.weight"][tokens]
            x = np.concatenate([
                _norm(table, w[f"{at}input_layernorm.weight"]),
                _norm(given, w[f"{at}hidden_norm.weight"]),
            ], -1)  # fmt: skip
            out = given + _attended(x, w, at)
            normed = _norm(out, w[f"{at}post_attention_layernorm.weight"])
            out = out + _fed_forward(normed, w, at)
            found.append(out[-1])
            given = np.concatenate([given, out[-1:]])
            tokens.append(draft[step] if draft is not None else self.token(out[-1]))
        return np.array(found)

    def logits(self, out):
        """Logits of the draft vocabulary of an output vector."""
        return _norm(out, self._head["norm.weight"]) @ self._head["lm_head.weight"].T

    def token(self, out):
        """The predicted token of an output vector."""
        best = int(np.argmax(self.logits(out)))
        return best + int(self._head["d2t"][best]) if "d2t" in self._head else best

    def drafts(self, ids, count):
        """The tokens that the head predicts after ``ids``."""
        return [self.token(out) for out in self.outputs(ids, count)]

    def gap(self, ids, answer):
        """By how much the logits of ``answer`` are below the best ones, at most."""
        worst = 0.0
        for token, out in zip(
            answer, self.outputs(ids, len(answer), answer), strict=True
        ):
            logits = self.logits(out)
            known = np.arange(len(logits)) + self._head.get("d2t", 0)
            (place,) = np.flatnonzero(known == token)
            worst = max(worst, logits.max() - logits[place])
        return worst


def fitted(target, head, texts, count=3, *, shift=0):
    """The head with a projection that predicts ``texts`` from its outputs.

    texts: pairs (ids, tokens that follow). Solved by least squares.
    """
    plain = PlainHead(target, head, shift=shift)
    rows, wanted = [], []
    norm = np.asarray(head[1]["norm.weight"], np.float64)
    for prompt, answer in texts:
        whole = [*prompt, *answer]
        for at in range(len(prompt) + 1, len(whole) - count):
            follow = whole[at : at + count]
            rows.append(_norm(plain.outputs(whole[:at], count, follow), norm))
            wanted += follow
    features = np.concatenate(rows)
    goal = np.eye(target[0]["vocab_size"])[wanted]
    weight = np.linalg.lstsq(features, goal, rcond=1e-6)[0].T
    weight = np.ascontiguousarray(weight, np.float32)
    return head[0], head[1] | {"lm_head.weight": weight}


def proposals(engine):
    """Record (tokens, proposal) of each query of an engine's drafter."""
    drafter, seen = engine.speculation.drafter, []
    propose = drafter.propose

    def recording(queries):
        texts = [tuple(query.tokens) for query in queries]
        answers = propose(queries)
        pairs = zip(texts, map(list, answers), strict=True)
        seen.extend((text, answer) for text, answer in pairs if answer)
        return answers

    drafter.propose = recording
    return seen


def assert_backend_drafts(
    backend, folder, requests=PLAIN_REQUESTS, *, plain=None, gap=1e-3, **settings
):
    """Compare outputs with and without a head, and its drafts with the plain model.

    plain: backend without the head, by default the same. gap: by which the logits of
    drafts may be below the best ones.
    """
    target = tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2, layers=3)
    head = random_head(np.random.default_rng(8), target[0], draft_vocab=64)
    files = MemoryCheckpoint(*target)
    language = LanguageModel(MODEL, MODEL.config(files.config), files)
    settings = {"max_batch": 4, "dtype": "float32"} | settings
    found = []
    for options in (
        {},
        {"speculation": "eagle", "draft_model": written(folder, *head)},
    ):
        config = EngineConfig(
            context=96, depth=1, adaptive_drafts=False, max_drafts=3,
            **options | settings,
        )  # fmt: skip
        tapped = with_draft_head(language, config)
        place = backend if options else plain or backend
        runner = start_runner(tapped, place, config)
        with InferenceEngine(language, None, config, runner=runner) as engine:
            seen = proposals(engine) if options else []
            found.append(told(outputs(engine, VOCAB, requests)))
    assert found[1] == found[0]
    model = PlainHead(target, head)
    assert len(seen) > 20
    for text, answer in seen[:: max(len(seen) // 12, 1)]:
        assert model.gap(text, answer) < gap, f"after {len(text)} tokens"
