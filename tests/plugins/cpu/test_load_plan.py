"""The native kernels that are explained are those that a started runner computes."""

from __future__ import annotations

import pytest

from explained_kernels import assert_explained, draft_head, explained, labels
from inl import EngineConfig
from inl.cli.explain import explain
from inl.plugin import make_backend
from inl.weights.quantize.report import KINDS

OPTIONS = {
    "plain": {},
    "float32": {"dtype": "float32"},
    "adapters": {"max_adapters": 2, "max_adapter_rank": 4},
    "adapters and int8": {"max_adapters": 1, "quantize": "int8"},
    "cache": {"kv_dtype": "int8"},
    "invariant": {"invariant": True},
    "invariant and int4": {"invariant": True, "quantize": "int4"},
    **{kind: {"quantize": kind} for kind in KINDS},
}


def config_of(**options):
    return EngineConfig(backend="cpu", context=64, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernels_that_are_explained_are_computed(name, monkeypatch):
    backend = make_backend("cpu")
    assert_explained(backend, config_of(**OPTIONS[name]), monkeypatch)


def test_the_kernels_of_a_draft_head(tmp_path, monkeypatch):
    config = config_of(
        speculation="eagle", draft_model=draft_head(tmp_path / "head"),
        adaptive_drafts=False,
    )  # fmt: skip
    assert_explained(make_backend("cpu"), config, monkeypatch)


def test_options_change_the_kernels():
    """The comparison above would see an option that is left out."""
    backend = make_backend("cpu")
    tables = {
        name: labels(explain(explained(backend, config_of(**options), 20, 2).tracer))
        for name, options in OPTIONS.items()
    }
    for name in ("adapters", "invariant"):
        assert tables[name] != tables["plain"], name
