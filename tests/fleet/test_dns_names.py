"""Engines behind a name of DNS, as of Kubernetes' headless services."""

from __future__ import annotations

import asyncio
import socket

import pytest

from fleets import Fleet, HeldEngine, answered
from inl.errors import DeviceError
from inl.fleet import membership
from inl.fleet.dns_names import DnsNames
from waiting import until

NAME = "dns:engines.test:7000"


class Names:
    """A resolver whose answers a test sets."""

    def __init__(self, monkeypatch):
        self.addresses: list[tuple[str, int]] | None = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        monkeypatch.setattr(membership, "DNS_SECONDS", 0.01)

    def _look_up(self, host, port, *given, **options):
        if host != "engines.test":
            return self._real(host, port, *given, **options)
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
        return [(socket.AF_INET, 1, 6, "", (each, port)) for each in self.addresses]


@pytest.fixture
def names(monkeypatch):
    return Names(monkeypatch)


def test_the_addresses_of_a_name_are_kept_while_it_cannot_be_asked(names, caplog):
    async def check():
        found = DnsNames([NAME])
        assert await found.look_up() == frozenset()
        names.addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
        both = await found.look_up()
        assert both == {"10.0.0.1:7000", "10.0.0.2:7000"}
        names.addresses = None
        for _ in range(3):
            assert await found.look_up() == both
        names.addresses = ["10.0.0.2"]
        assert await found.look_up() == {"10.0.0.2:7000"}

    asyncio.run(check())
    (line,) = caplog.messages
    assert line == f"{NAME}: engines stay as they are: Temporary failure"


def test_a_name_needs_a_port():
    with pytest.raises(DeviceError, match=r"found 'engines\.test', accepted"):
        DnsNames(["dns:engines.test"])


def test_engines_come_and_go_with_their_addresses(names):
    """Two hosts of one port: engines listen on addresses of the loopback network."""
    with HeldEngine(max_batch=2) as one:
        port = int(one.address.rpartition(":")[2])
        names.addresses = ["127.0.0.1"]
        with Fleet([f"dns:engines.test:{port}"]) as fleet:
            wanted = answered(fleet)
            names.addresses = ["127.0.0.1", "127.0.0.9"]
            until(lambda: len(fleet.client.engines) == 2)
            assert answered(fleet) == wanted
            # One that serves stays until its connection ends, also without a name.
            names.addresses = []
            until(lambda: [e.address for e in fleet.client.engines] == [one.address])
            assert answered(fleet) == wanted
            names.addresses = ["127.0.0.9"]
            one.stop()
            until(
                lambda: (
                    [e.address for e in fleet.client.engines] == [f"127.0.0.9:{port}"]
                )
            )
