"""Routers of plugins: they choose engines, and a broken one changes no answer."""

from __future__ import annotations

import logging

import pytest

from fleets import EngineProcess, Fleet
from http_servers import HashServer
from inl.cli import plugin_router
from inl.cli.serve_fleet import fleet_mode
from inl.cli.serve_options import FleetOptions
from inl.errors import RequestError
from inl.fleet.plugin_router import GuardedPolicy, ReplicaLoad, RoutedPrompt
from inl.plugin import load_registry
from inl.serve.settings import ServerConfig
from waiting import until

TEXT = "/v1/completions"
BODY = {"seed": 3, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
PLUGIN = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_routers(register):
    for name in ("last", "unmade", "odd"):
        register(name, f"fake_routers:{name}")

class last:
    def choose(self, prompt, replicas):
        return replicas[-1].number

def unmade():
    raise ZeroDivisionError("so there")

def odd():
    return 7
"""


class Policy:
    """Chooses by a function and remembers what it was asked."""

    def __init__(self, choose):
        self.asked, self._choose = [], choose

    def choose(self, prompt, replicas):
        self.asked.append((prompt, list(replicas)))
        return self._choose(prompt, replicas)


def load(number, **changes):
    fields = {
        "address": f"h:{number}", "device": "cpu:0", "places": 4, "open": 0,
        "queued_tokens": 0, "cached_tokens": 0, "seconds_per_token": 0.0,
    }  # fmt: skip
    return ReplicaLoad(number=number, **{**fields, **changes})


PROMPT = RoutedPrompt(tokens=[1, 2], output_tokens=0, client="anonymous", model=None)
LOADS = [load(4), load(9)]


def test_a_choice_is_that_of_the_policy_or_none():
    guarded = GuardedPolicy(Policy(lambda _, replicas: replicas[-1].number), "r")
    assert guarded.choose(PROMPT, LOADS) is LOADS[1]
    assert guarded.choose(PROMPT, []) is None
    assert GuardedPolicy(Policy(lambda *_: None), "r").choose(PROMPT, LOADS) is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda *_: 1 / 0, "ZeroDivisionError"),
        (lambda *_: 5, "found 5, accepted: None, or the number of a replica: 4, 9"),
        (lambda *_: "h:4", "found 'h:4'"),
        (lambda *_: SystemError("no"), "found SystemError"),
    ],
)
def test_a_broken_policy_is_not_asked_again(wrong, says, caplog):
    policy = Policy(wrong)
    guarded = GuardedPolicy(policy, "acme: router r")
    with caplog.at_level(logging.WARNING, "inl.serve"):
        assert [guarded.choose(PROMPT, LOADS) for _ in range(3)] == [None] * 3
    assert len(policy.asked) == 1
    (record,) = caplog.records
    assert "acme: router r: not asked again" in record.getMessage()
    assert says in record.getMessage()


@pytest.fixture
def registered(tmp_path, monkeypatch):
    (tmp_path / "fake_routers.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = load_registry([], ["fake_routers"])
    monkeypatch.setattr(plugin_router, "registry", lambda: known)


@pytest.mark.usefixtures("registered")
def test_a_router_is_made_by_its_name():
    made = plugin_router.make_plugin_router("last")
    assert made.choose(PROMPT, LOADS) is LOADS[1]
    for name, says in (
        ("unmade", "router unmade failed: ZeroDivisionError: so there"),
        ("odd", "found int without choose"),
        ("other", "accepted: the name of a plugin's router: last, odd, unmade"),
    ):
        with pytest.raises(RequestError, match=says):
            plugin_router.make_plugin_router(name)


def test_a_router_needs_engines_to_choose_from():
    def mode(**options):
        given = FleetOptions(router="last", **options)
        return fleet_mode(given, [], ServerConfig(), has_model=True, others={})

    assert mode(replicas=2).value == mode(replica=["a:1"]).value == "fleet"
    for options in ({}, {"engine_only": True}):
        with pytest.raises(RequestError, match="--router: found no --replica"):
            mode(**options)


def test_requests_go_where_the_policy_says_also_after_a_loss():
    """It sees the prompt, and the load and the cached tokens of each engine."""
    policy = Policy(lambda prompt, replicas: max(each.number for each in replicas))
    prompt = list(range(150))
    with (
        HashServer(max_batch=4) as plain,
        EngineProcess(max_batch=8, seconds=0.01) as one,
        EngineProcess(max_batch=8, seconds=0.01) as two,
        Fleet(
            [one.address, two.address], policy=GuardedPolicy(policy, "r")
        ) as fleet,
    ):  # fmt: skip
        until(lambda: len(fleet.client.members.by_number) == 2)
        numbers = {each.number: each for each in fleet.client.engines}
        chosen = numbers[max(numbers)]
        for _ in range(2):
            body = {"prompt": prompt, **BODY}
            found = fleet.send("POST", TEXT, body)[2]
            wanted = plain.send("POST", TEXT, body)[2]
            assert found["choices"] == wanted["choices"]
        first, again = policy.asked
        assert list(first[0].tokens) == prompt
        assert (first[0].client, first[0].output_tokens) == ("anonymous", 0)
        cached = {each.address: each.cached_tokens for each in first[1]}
        assert cached == {one.address: 0, two.address: 0}
        cached = {each.address: each.cached_tokens for each in again[1]}
        assert cached.pop(chosen.address) == 128
        assert list(cached.values()) == [0]
        engines = {one.address: one, two.address: two}
        lines = []
        for line in fleet.stream(TEXT, {**body, "max_tokens": 60}):
            lines.append(line)
            if len(lines) == 10:
                engines[chosen.address].kill()
        assert lines[-1] == "data: [DONE]"
        assert fleet.counts["continued"] == 1
        moved, replicas = policy.asked[-1]
        assert moved.output_tokens > 0
        assert [each.address for each in replicas] == [
            address for address in engines if address != chosen.address
        ]
