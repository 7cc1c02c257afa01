"""Models with recurrent layers verify drafts: state goes back to accepted tokens."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from depth import mostly_full
from inl import EngineConfig, InferenceEngine
from inl.executor.draft_state import RecurrentOps
from inl.executor.model_loader import LanguageModel
from inl.speculation import setup
from inl.speculation.draft_counts import StepTimes
from inl.speculation.eagle_drafter import EagleDrafter
from inl.testing.tiny import MemoryCheckpoint

NAMES = ("qwen3_next", "granite_hybrid", "lfm2", "falcon_h1", "nemotron_h")
PROMPTS = [[*[3, 4, 5, 6] * 6, 3, 4], [7, 8, 9] * 5, [11] * 9, [*range(40, 60)]]


def language_of(name, random_checkpoint, change=lambda files: files):
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = change(random_checkpoint(model, name, vocab_size=96))
    return LanguageModel(model, model.config(files.config), files)


class Known:
    """Drafts what follows in one of some texts, some of it wrong."""

    def __init__(self, texts):
        self._texts = [tuple(text) for text in texts]

    def propose(self, queries):
        return [self._after(tuple(query.tokens), query.limit) for query in queries]

    def _after(self, ids, count):
        following = (
            text[len(ids) :] for text in self._texts if text[: len(ids)] == ids
        )
        found = next(following, ())[:count]
        at = len(ids)
        return [x + ((at + n) % 3 == 0) * (-1) ** x for n, x in enumerate(found)]

    def forget(self, request):
        pass

    def close(self):
        pass


def answers(language, drafter=None, **options):
    """Tokens at two temperatures, and the engine's counts of drafts."""
    options = {"speculation": None} | options
    if options["speculation"] not in (None, "auto"):
        options |= {"adaptive_drafts": False, "max_drafts": 3}
    config = EngineConfig(
        backend="reference", dtype="float64", context=96, max_batch=4, **options
    )
    with InferenceEngine(language, config=config, drafter=drafter) as engine:
        found = []
        for sampling in ({}, {"temperature": 0.8, "seed": 5}):
            done = engine.generate(PROMPTS, max_tokens=24, ignore_eos=True, **sampling)
            found.append([each.token_ids for each in done])
        counts = engine.speculation
        return found, counts and (counts.drafted, counts.accepted)


def known(plain):
    return Known(
        [*prompt, *ids]
        for found in plain
        for prompt, ids in zip(PROMPTS, found, strict=True)
    )


@pytest.mark.parametrize("name", mostly_full(NAMES, 2))
def test_drafts_change_no_token(name, random_checkpoint):
    language = language_of(name, random_checkpoint)
    plain, _ = answers(language)
    drafted, (count, accepted) = answers(language, known(plain), speculation="ngram")
    assert drafted == plain
    assert count > accepted > 60


def test_state_that_stays_shows(random_checkpoint, monkeypatch):
    language = language_of("qwen3_next", random_checkpoint)
    plain, _ = answers(language)
    monkeypatch.setattr(RecurrentOps, "committed", lambda *given: given[-1])
    assert answers(language, known(plain), speculation="ngram")[0] != plain


def with_mtp(files):
    """The checkpoint with a random layer that predicts further tokens."""
    rng, tensors = np.random.default_rng(3), {}
    for name in files.names():
        tensors[name] = files.tensor(name).data
    at = next(n for n in tensors if "self_attn.q_proj" in n).split("self_attn")[0]
    hidden = files.config["hidden_size"]
    shapes = {
        f"mtp.layers.0.{name.removeprefix(at)}": x.shape
        for name, x in tensors.items()
        if name.startswith(at)
    }
    norms = "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in norms}
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    drawn = {
        name: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    return MemoryCheckpoint(files.config, tensors | drawn)


@pytest.mark.parametrize("name", mostly_full(["qwen3_next", "qwen3_5", "qwen3_5_moe"]))
def test_the_layer_of_a_checkpoint_drafts(name, random_checkpoint, monkeypatch):
    language = language_of(name, random_checkpoint, with_mtp)
    plain, _ = answers(language)
    drafted, (count, accepted) = answers(language, speculation="mtp")
    assert drafted == plain
    assert count > accepted
    # By default too, where it pays.
    times = StepTimes({2: 1.0, 128: 1.1}, {1: 1.0, 4: 1.0})
    monkeypatch.setattr(setup, "measure_step_times", lambda *_, **__: times)
    monkeypatch.setattr(EagleDrafter, "measure", lambda *_: None)
    chosen, (count, _) = answers(language, speculation="auto")
    assert chosen == plain
    assert count > 4


def test_steps_with_a_grammar_have_no_drafts(random_checkpoint, byte_tokenizer):
    model = importlib.import_module("inl.models.qwen3_next").MODEL
    files = random_checkpoint(model, "qwen3_next", vocab_size=256)
    language = LanguageModel(model, model.config(files.config), files)
    found = []
    for speculation in (None, "ngram"):
        more = {"adaptive_drafts": False} if speculation else {}
        config = EngineConfig(
            backend="reference", dtype="float64", context=96, speculation=speculation,
            **more,
        )  # fmt: skip
        with InferenceEngine(language, byte_tokenizer, config) as engine:
            done = engine.generate(
                [5, 6, 7, 5, 6, 7, 5, 6],
                max_tokens=20,
                structured={"regex": "(ab|cd){12}"},
            )
            found.append(done.token_ids)
            if speculation:
                assert engine.speculation.drafted == 0
    assert found[0] == found[1]
