"""Drafters of plugins: used by name, and harmless where they are wrong or broken."""

from __future__ import annotations

import logging
import sys

import pytest

from drafted import outputs, prompts, told
from inl import EngineConfig
from inl.errors import RequestError
from inl.plugin import load_registry
from inl.speculation import plugin_drafter
from tiny_engines import VOCAB

PLUGIN = """
from inl.plugin import hookimpl

NAMES = ("repeats", "rated", "raises", "short", "words", "outside", "unmade", "odd")

@hookimpl
def inl_register_drafters(register):
    for name in NAMES:
        register(name, f"fake_drafters:{name}")

class Base:
    def __init__(self, target):
        self.target, self.asked, self.ended = target, 0, []

    def propose(self, queries):
        self.asked += 1
        return [self.tokens(query) for query in queries]

    def tokens(self, query):
        return list(query.tokens[-1:]) * (query.limit + 5)

    def forget(self, request):
        self.ended.append(request)

    def close(self):
        self.ended.append("closed")

def repeats(target):
    global made
    made = Base(target)
    return made

def rated(target):
    class Rated(Base):
        def rate(self, request):
            return 0.5
    return Rated(target)

def raises(target):
    made = repeats(target)
    def tokens(query):
        raise ZeroDivisionError("so there")
    made.tokens = tokens
    return made

def short(target):
    made = repeats(target)
    made.propose = lambda queries: []
    return made

def words(target):
    made = repeats(target)
    made.tokens = lambda query: ["a"] * query.limit
    return made

def outside(target):
    made = repeats(target)
    made.tokens = lambda query: [target.vocab] * query.limit
    return made

def unmade(target):
    raise OSError("no such index")

def odd(target):
    return object()
"""


@pytest.fixture(autouse=True)
def plugin(monkeypatch, tmp_path):
    """The plugin of the drafters, as a module."""
    (tmp_path / "fake_drafters.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    known = load_registry((), ["fake_drafters"])
    assert known.failed == ()
    monkeypatch.setattr("inl.plugin.registry", lambda: known)
    monkeypatch.setattr(plugin_drafter, "registry", lambda: known)
    yield sys.modules["fake_drafters"]
    del sys.modules["fake_drafters"]


@pytest.fixture
def wanted(engines):
    return told(outputs(engines(), VOCAB))


def test_outputs_are_those_without_drafts(engines, wanted, plugin):
    engine = engines(speculation="repeats", max_drafts=4, adaptive_drafts=False)
    assert told(outputs(engine, VOCAB)) == wanted
    assert engine.speculation.drafted > 0
    made = plugin.made
    assert made.asked > 0
    assert set(made.ended) == set(range(1, 1 + len(prompts(VOCAB))))
    engine.close()
    assert made.ended[-1] == "closed"


def test_a_drafter_learns_what_it_predicts_for(engines, plugin):
    engines(
        speculation="repeats", max_drafts=4, adaptive_drafts=False, draft_model="index"
    )
    target = plugin.made.target
    assert (target.vocab, target.max_drafts, target.context) == (VOCAB, 4, 96)
    assert (target.sequences, target.draft_model) == (4, "index")
    assert target.path.name == "memory"


def test_a_drafter_that_knows_its_rates(engines, wanted):
    engine = engines(speculation="rated", max_drafts=4, adaptive_drafts=False)
    assert told(outputs(engine, VOCAB)) == wanted
    assert engine.speculation.drafted > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "ZeroDivisionError: so there"),
        ("short", "found 0 proposals for "),
        ("words", "found the token 'a', accepted: whole numbers from 0 to 255"),
        ("outside", "found the token 256, accepted: whole numbers from 0 to 255"),
    ],
)
def test_a_broken_drafter_costs_no_request(
    engines, wanted, plugin, caplog, name, words
):
    engine = engines(speculation=name, max_drafts=4, adaptive_drafts=False)
    with caplog.at_level(logging.WARNING, "inl"):
        assert told(outputs(engine, VOCAB)) == wanted
    (said,) = [each.message for each in caplog.records if "drafter" in each.message]
    assert said.startswith(f"plugin fake_drafters (INL_PLUGINS): drafter {name}: not ")
    assert words in said
    assert engine.speculation.drafted == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unmade", "fake_drafters .* failed: OSError: no such index"),
        ("odd", "returned object without propose, forget, close; accepted: a Drafter"),
    ],
)
def test_a_drafter_that_cannot_be_made_ends_the_start(engines, name, words):
    with pytest.raises(RequestError, match=words):
        engines(speculation=name, max_drafts=4, adaptive_drafts=False)


@pytest.mark.parametrize("value", ["magic", 7, []])
def test_a_name_that_nobody_registers(value):
    with pytest.raises(RequestError, match="or of a plugin: odd, outside, raises, rat"):
        EngineConfig(speculation=value)
