"""Every family against transformers: tiny models with random weights.

Each feature of a config has a mutant, our model with that feature off, which
fails the same comparison by ten times the bound.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from depth import mostly_long
from inl.device import Device
from inl.executor.model_loader import open_model
from inl.spec.dispatch import DynamicOps
from inl.testing.traffic import Traffic, play

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
families = importlib.import_module("families")
MUTANTS = importlib.import_module("family_mutants").MUTANTS

BOUND = 1e-4
NAMES = list(families.FAMILIES)
TOKENS, WINDOW = families.TOKENS, families.WINDOW
ONE_BY_ONE = (9, *range(10, TOKENS))
CHUNKED = [(1,), (6, 7, 8), (5, 12, 13, 30), (20, 39)]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Models by name, each made once."""
    found = {}

    def get(name):
        if name not in found:
            found[name] = families.make(name, tmp_path_factory.mktemp(name))
        return found[name]

    return get


def backend_named(name):
    if name == "cpu":
        from inl_cpu.backend import open_cpu

        return open_cpu(Device("cpu:0")), "float32"
    if name == "torch":
        from inl_cpu.torch_backend import TorchCpuBackend

        return TorchCpuBackend(Device("cpu:0")), "float32"
    return families.reference(name), name


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(
            name, backend,
            marks=[pytest.mark.full] if name in families.OF_OTHERS and late else [],
        )
        for name in NAMES
        for backend, late in (
            ("float64", True), ("float32", True), ("cpu", False), ("torch", True)
        )
    ],
)  # fmt: skip
def test_logits_are_transformers(name, backend, made):
    """At once, in pieces that end anywhere, and one token at a time."""
    one = made(name)
    runner = families.opened(one, *backend_named(backend))
    for cuts in [(), ONE_BY_ONE, *CHUNKED]:
        found = families.logits(runner, one.ids, cuts)
        assert families.distance(found, one.logits) < BOUND, cuts


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.full] if name in families.OF_OTHERS else []
        )
        for name in NAMES
    ],
)
def test_logits_do_not_depend_on_strangers(name, made):
    one = made(name)
    rng = np.random.default_rng(3)
    texts = {1: rng.integers(3, families.VOCAB, 33).tolist(), 2: one.ids}
    texts[3] = rng.integers(3, families.VOCAB, 19).tolist()
    stops = [
        {1: 8, 2: 3, 3: 0}, {1: 9, 2: 4, 3: 5}, {1: 10, 2: 17, 3: 6},
        *({1: 10 + n, 2: 17 + n, 3: 6 + n} for n in range(1, 13)),
    ]  # fmt: skip
    runner = families.opened(one, *backend_named("cpu"))
    found = families.logits_of(runner, texts, stops)
    assert families.distance(found[2], one.logits) < BOUND
    again = families.opened(one, *backend_named("float64"))
    for slot, ids in texts.items():
        assert families.distance(found[slot], families.logits(again, ids)) < BOUND


def embedded(made, dtype):
    """The scaled embeddings of a text in bfloat16, with the factor as in ``dtype``."""
    one = made("gemma3")
    backend, _ = backend_named("torch")
    runner = families.load(open_model(one.path), backend, "bfloat16")
    loaded = runner.loaded
    config = replace(loaded.config, dtype=dtype)
    ids = torch.tensor(one.ids)
    step = SimpleNamespace(tokens=ids, positions=torch.arange(len(ids)))
    ops = DynamicOps(backend.kernels())
    return loaded.model.embed(ops, config, loaded.weights, step).residual


def test_scaled_embeddings_are_rounded_as_in_transformers(made):
    """The factor is rounded to the storage dtype first, then the product is."""
    one = made("gemma3")
    model = transformers.Gemma3ForCausalLM.from_pretrained(one.path, dtype="bfloat16")
    with torch.no_grad():
        expected = model.model.embed_tokens(torch.tensor([one.ids]))[0]
    assert torch.equal(embedded(made, "bfloat16"), expected)
    assert not torch.equal(embedded(made, "float32"), expected)


@pytest.mark.parametrize(
    "name", mostly_long(["gemma3", "qwen3-next", "nemotron-h", "lfm2", "gemma3n"], 2)
)
def test_jax_chooses_the_same_tokens(name, made, jax_module):
    from inl_jax.xla import recurrent, ssm

    language = open_model(made(name).path)
    kernels = (*recurrent.KERNELS, *ssm.KERNELS)
    made_here = {each.op: each.run for each in kernels}
    backend = jax_module.jax_backend(replaced=made_here)(Device("jax:0"))
    fast = families.load(language, backend, "float32")
    exact = families.load(language, families.reference(), "float64")

    def texts(runner):
        traffic = Traffic(np.random.default_rng(6), fast.limits)
        return play(runner, traffic.frames(24))

    found = texts(fast)
    assert found == texts(exact)
    assert len({token for text in found.values() for token in text}) > 5


CASES = [
    case
    for name, found in MUTANTS.items()
    for case in mostly_long(
        [(name, feature) for feature in found], 1 if name in families.OF_OTHERS else 2
    )
]


def test_every_family_has_mutants():
    assert set(MUTANTS) == set(families.FAMILIES)


@pytest.mark.parametrize(("name", "feature"), CASES)
def test_a_feature_that_is_off_shows(name, feature, made, monkeypatch):
    mutant, one = MUTANTS[name][feature], made(name)
    if mutant.patch:
        monkeypatch.setattr(*mutant.patch)
    language = open_model(one.path)
    language = replace(language, config=mutant.config(language.config))
    backend, dtype = families.reference(), "float64"
    runner = families.load(language, backend, dtype, weights=mutant.weights)
    found = families.logits(runner, one.ids, ONE_BY_ONE)
    assert families.distance(found, one.logits) > 10 * BOUND
