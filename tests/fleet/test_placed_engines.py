"""Engines that the place of a plugin starts: replaced, rolled and ended."""

from __future__ import annotations

import pytest

from fleets import (
    FOLDER,
    LONG,
    SLOW,
    TEXT,
    EngineProcess,
    Fleet,
    answered,
    disturbed,
)
from http_servers import HashServer
from inl.cli.fleet_api import FleetApi
from inl.cli.fleet_roll import Roll
from inl.errors import RequestError, WorkerLost
from inl.fleet.placed_engines import PlacedEngines
from inl.workers import place
from inl.workers.address import WorkerAddress
from started_workers import Child
from waiting import until

CHILD = WorkerAddress("", "auto", "child")

MODULE = EngineProcess.script.removesuffix(".py")
LONGER = {**LONG, "max_tokens": 400}
"""Takes 4 s, of which something happens in the first moment."""


class Registry:
    """Has one place, which starts child processes."""

    def __init__(self):
        self.children = []

    def names(self, kind):
        return ["child"]

    def function(self, kind, name):
        return "a plugin", self._start

    def _start(self, request):
        self.children.append(Child(request.arguments, request.environment))
        return self.children[-1]


@pytest.fixture
def registry(monkeypatch):
    made = Registry()
    monkeypatch.setattr(place, "builtin_registry", lambda: made)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")
    yield made
    for child in made.children:
        child.stop(0.0)


def rows(fleet):
    return fleet.send("GET", "/load")[2]["replicas"]


def until_ready(fleet, count):
    until(lambda: [each["state"] for each in rows(fleet)] == ["ready"] * count)


@pytest.mark.full
def test_engines_of_a_place_are_replaced_and_rolled(registry):
    placed = PlacedEngines(CHILD, MODULE, SLOW, 2, 30.0)
    config = {"admin_keys": ("operator",)}
    with (
        HashServer(max_batch=8) as plain,
        Fleet([], config=config, local=placed) as fleet,
    ):
        until_ready(fleet, 2)

        def kill():
            (busy,) = [each["address"] for each in rows(fleet) if each["open"]]
            name = placed._engines[busy].name
            (child,) = [each for each in registry.children if each.name == name]
            child.process.kill()

        assert disturbed(fleet, [], kill, LONGER) == answered(plain, LONGER)
        assert fleet.counts["continued"] == 1
        until(lambda: len(registry.children) == 3)
        until_ready(fleet, 2)
        before = {each["address"] for each in rows(fleet)}
        roll = Roll(FleetApi(fleet.url, "operator"), None, 300.0, lambda _: None)
        assert disturbed(fleet, [], lambda: roll.run(None, in_place=False)) == (
            answered(plain)
        )
        assert not before & {each["address"] for each in rows(fleet)}
        assert fleet.counts["lost"] == 1
        assert [each.alive for each in registry.children].count(True) == 2
        with pytest.raises(RequestError, match="would have another one"):
            roll.run(None, in_place=True)
        assert fleet.send("POST", TEXT, {**LONG, "max_tokens": 2})[0] == 200
    assert not any(each.alive for each in registry.children)
    assert all(each.process.returncode == 0 for each in registry.children[3:])


@pytest.mark.full
def test_one_that_cannot_start_ends_the_server(registry):
    placed = PlacedEngines(CHILD, "no_such_module", SLOW, 1, 30.0)
    fleet = Fleet([], local=placed)
    with pytest.raises(WorkerLost, match="No module named no_such_module"):
        fleet._run()
