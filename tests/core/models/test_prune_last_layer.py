"""A pruned last layer against one that computes all tokens."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inl import EngineConfig
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.executor.model_loader import LanguageModel, open_model
from inl.ops.mlp import ACTIVATIONS
from inl.plugin.builtin import FAMILIES
from inl.runners.local_runner import start_runner
from inl.spec.step import Bucket
from inl.testing.play import admission, one_step

DEVICE = Device("reference:0")
DATA = Path(__file__).parents[2] / "data"
NAMES = sorted({module for _, _, module in FAMILIES} - {"deep", "deep_v04"})
INL = ("inl-v013", "inl-v013/carry", "inl-v040")
FEED_FORWARD = (
    "norm_mlp", "gated_mlp", "experts", "token_routed_mlp", "combine_experts",
    "gated_activation",
)  # fmt: skip

STEPS = (
    # (slot, tokens) of each row, decoding rows, and padding: tokens and rows
    (((1, 7), (2, 5)), 0, (0, 0)),
    (((1, 1), (2, 6), (3, 9)), 1, (3, 2)),
    (((1, 1), (2, 1), (3, 1)), 3, (0, 0)),
    (((3, 8),), 0, (0, 0)),
    (((1, 1), (3, 1), (2, 2)), 2, (0, 0)),
    (((3, 1), (1, 1), (2, 1)), 3, (0, 1)),
)
"""Prompt chunks, decoding rows beside them, and decoding after them."""


@pytest.fixture(params=[*NAMES, *INL])
def language(request, random_checkpoint):
    name = request.param
    if name in NAMES:
        model = importlib.import_module(f"inl.models.{name}").MODEL
        files = random_checkpoint(model, name)
        return LanguageModel(model, model.config(files.config), files)
    found = open_model(DATA / name.split("/")[0])
    if not name.endswith("carry"):
        return found
    return replace(found, config=replace(found.config, velocity="carry"))


def logits(language, layer):
    """Logits of the used rows of every step of :data:`STEPS`."""
    config = EngineConfig(backend="reference", dtype="float64", max_batch=4, context=64)
    model = replace(language.model, layer=layer)
    runner = start_runner(
        replace(language, model=model),
        ReferenceBackend(DEVICE, dtype="float64"),
        config,
    )
    limits, rng = runner.limits, np.random.default_rng(5)
    each = 32 // limits.block_size
    for slot in (1, 2, 3):
        first = 1 + each * (slot - 1)
        runner.submit(admission(limits, slot, list(range(first, first + each))))
    for number, (rows, decoding, padding) in enumerate(STEPS):
        parts = [(slot, rng.integers(1, 90, n).tolist()) for slot, n in rows]
        frame = one_step(limits, parts, step=number, decoding=decoding, padding=padding)
        yield runner.logits(frame).data[: len(rows)]
    runner.close()


class Watched:
    """Ops that record the number of tokens of the feed-forward layers."""

    def __init__(self, ops, index, seen, names):
        self._ops, self._index, self._seen = ops, index, seen
        self._names = names

    def __getattr__(self, name):
        run = getattr(self._ops, name)
        if not callable(run):  # the size of a block
            return run

        def noted(x, *args, **attrs):
            if name in self._names and isinstance(x, np.ndarray):
                self._seen.setdefault(self._index, set()).add(x.shape[0])
            return run(x, *args, **attrs)

        return noted


def test_pruned_logits_equal_those_of_all_tokens(language):
    seen = {}
    plain = language.model.layer
    fused = getattr(language.config, "activation", "silu") in ACTIVATIONS
    names = FEED_FORWARD if fused else ("activate", "xielu")

    def watched(ops, *rest, index, sampled_step=None):
        watch = Watched(ops, index, seen, names)
        return plain(watch, *rest, index=index, sampled_step=sampled_step)

    def whole(ops, *rest, index):
        return plain(ops, *rest, index=index)

    last = language.config.layers - 1
    found, expected = logits(language, watched), logits(language, whole)
    for (rows, _, padding), got, want in zip(STEPS, found, expected, strict=True):
        assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()
        tokens = sum(count for _, count in rows) + padding[0]
        held = len(rows) + padding[1]
        assert seen.pop(0) == {tokens}
        assert seen.pop(last) == {min(tokens, held)}
        seen.clear()


def test_steps_that_sample_every_token_are_not_pruned(random_checkpoint):
    """No gather, and nothing else, is added to a step that decodes or verifies."""
    model = importlib.import_module("inl.models.llama").MODEL
    files = random_checkpoint(model, "llama")
    language = LanguageModel(model, model.config(files.config), files)
    config = EngineConfig(backend="reference", dtype="float64", max_batch=4, context=64)
    runner = start_runner(language, ReferenceBackend(DEVICE), config)

    def calls(bucket):
        return {op for op, _ in runner.executor.tracer(bucket).counts}

    decoding = calls(Bucket(4, 4))
    assert calls(Bucket(1, 1)) == decoding
    assert calls(Bucket(8, 4, 2)) == decoding | {"expand_rows", "verify"}
    assert calls(Bucket(9, 4)) - decoding == {"prune_last_layer"}
