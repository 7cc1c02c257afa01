"""The engines of a fleet: which there are, which are ready, and which gets a prompt."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any

from inl.fleet.engine_link import EngineLink, State
from inl.fleet.plugin_router import ReplicaLoad, RoutedPrompt
from inl.fleet.prefix_index import BLOCK_TOKENS
from inl.fleet.router import Router
from inl.serve.api_error import ApiError

if TYPE_CHECKING:
    from collections.abc import Collection

    from inl.fleet.calls import Call
    from inl.fleet.plugin_router import GuardedPolicy
    from inl.serve.frontends.messages import Replica

log = logging.getLogger("inl.serve")

ADAPTER = "adapter "
"""Begins the fields of an identity that name adapters."""

SLOW_SECONDS = 0.5
"""Time between two looks for slow engines."""


class Members:
    """Engines, of which a router or a plugin's policy chooses."""

    def __init__(self, policy: GuardedPolicy | None = None) -> None:
        self.engines: list[EngineLink] = []
        self.router = Router()
        self.by_number: dict[int, EngineLink] = {}
        """Engines that are connected."""
        self.described: Replica | None = None
        """The first engine that was used; others have the same identity."""
        self._policy = policy
        self.adapters: dict[str, str] = {}
        """Digests of all adapters that engines have had, by name."""
        self._identities: dict[str, str] = {}
        """By the digest of the adapter."""
        self._changed = asyncio.Event()
        """Replaced by another one whenever an engine becomes ready."""
        self._numbers = 0

    def identity_of(self, model: str | None) -> str:
        """Digest of what decides which tokens follow a prompt, once it is known.

        model: as in requests, which may name an adapter.
        """
        if self.described is None:
            return ""
        digest = self.adapters.get(model or "", "")
        if digest not in self._identities:
            shared, _ = _split(self.described.identity)
            fields = str((sorted(shared.items()), digest)).encode()
            self._identities[digest] = hashlib.sha256(fields).hexdigest()[:32]
        return self._identities[digest]

    async def until_changed(self) -> None:
        """Wait until an engine becomes ready, or one is lost."""
        await self._changed.wait()

    def engine_loads(self) -> list[dict[str, Any]]:
        """Return what is known of each engine, for people and dashboards."""
        loads = []
        for engine in self.engines:
            load = self.router.loads.get(engine.number)
            loads.append(
                {
                    "address": engine.address,
                    "state": engine.state.value,
                    "state_seconds": round(time.monotonic() - engine.changed_at, 3),
                    "reason": engine.reason,
                    "device": engine.device,
                    "clock_seconds": engine.clock_seconds,
                    "process": engine.name,
                    "open": 0 if load is None else load.open,
                    "places": 0 if load is None else load.places,
                    "queued_tokens": 0 if load is None else load.queued_tokens,
                    "seconds_per_token": 0 if load is None else load.seconds_per_token,
                    "slowness": 1.0 if load is None else load.slowness,
                    "prompt_tokens": 0 if load is None else load.prompt_tokens,
                    "cached_tokens": 0 if load is None else load.cached_tokens,
                }
            )
        return loads

    async def watch(self) -> None:
        """Look for slow engines until it is cancelled."""
        while True:
            await asyncio.sleep(SLOW_SECONDS)
            for number in self.router.notice_slow():
                engine, load = self.by_number[number], self.router.loads[number]
                if load.slowness == 1:
                    log.info("engine %s: is as fast as others again", engine.address)
                    continue
                log.warning(
                    "engine %s: is slow, its 90th percentile is %.1f times the usual "
                    "one; it gets less", engine.address, load.slowness,
                )  # fmt: skip

    def join(self, engine: EngineLink, described: Replica) -> str:
        """Count an engine that is connected; returns why it cannot be used."""
        shared, adapters = _split(described.identity)
        if self.described is None:
            self.described = described
        else:
            # It may have other adapters, but no other one of a name.
            ours, _ = _split(self.described.identity)
            theirs = dict(shared)
            for name in adapters.keys() & self.adapters.keys():
                ours[ADAPTER + name] = self.adapters[name]
                theirs[ADAPTER + name] = adapters[name]
            reason = _difference(ours, theirs)
            if reason:
                return f"has other weights or options than the fleet: {reason}"
        self.adapters |= adapters
        self._numbers += 1
        engine.number = self._numbers
        engine.places = described.places
        self.by_number[engine.number] = engine
        self.router.add(engine.number, engine.places, described.cache_tokens, adapters)
        return ""

    def announce(self) -> None:
        """Let those look again who wait for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()

    def has_other(self, engine: EngineLink) -> bool:
        """Return whether another engine is ready."""
        return any(
            each is not engine and each.state is State.READY for each in self.engines
        )

    def problem(self) -> str | None:
        """Return why no engine is ready; ``None`` if one is."""
        if any(each.state is State.READY for each in self.engines):
            return None
        reasons = [f"{each.address} {each.reason}" for each in self.engines]
        return "; ".join(reasons) or "there is none"

    def choose(
        self, call: Call, prompt: int, output_tokens: int, refused: Collection[int]
    ) -> tuple[int, int] | None:
        """Return an engine for a prompt of a call, as :meth:`Router.choose` does."""
        keys, given = call.keys[prompt], call.submit
        tokens = given.prompts[prompt]
        if self._policy is not None:
            chosen = self._policy.choose(
                RoutedPrompt(
                    tokens=tokens, output_tokens=output_tokens, client=given.client,
                    model=given.model,
                ),
                [
                    self._load(*each, len(tokens))
                    for each in self.router.usable(keys, refused, call.adapter).items()
                ],
            )  # fmt: skip
            if chosen is not None:
                return chosen.number, chosen.cached_tokens
        return self.router.choose(
            keys, len(tokens) + output_tokens, refused, call.adapter
        )

    def _load(self, number: int, blocks: int, tokens: int) -> ReplicaLoad:
        engine, load = self.by_number[number], self.router.loads[number]
        return ReplicaLoad(
            number=number,
            address=engine.address,
            device=engine.device,
            places=load.places,
            open=load.open,
            queued_tokens=load.queued_tokens,
            cached_tokens=min(blocks * BLOCK_TOKENS, max(tokens - 1, 0)),
            seconds_per_token=load.seconds_per_token,
        )

    async def wait_for_engine(self, end: float, adapter: str = "") -> None:
        """Wait until another engine is ready; raises :class:`ApiError` 503.

        adapter: that it must have, if any.
        """
        changed = self._changed
        try:
            async with asyncio.timeout(max(end - time.monotonic(), 0)):
                await changed.wait()
        except TimeoutError:
            lacking = f"none has adapter {adapter}" if adapter else "all are busy"
            raise ApiError(
                503,
                f"no engine is ready: {self.problem() or lacking}; try again later",
                code="no_engine",
                retry_after=1,
            ) from None


def _split(identity: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what all engines must have in common, and digests of adapters by name."""
    shared, adapters = {}, {}
    for field, value in identity.items():
        if field.startswith(ADAPTER):
            adapters[field.removeprefix(ADAPTER)] = value
        else:
            shared[field] = value
    return shared, adapters


def _difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return what differs between two engines; empty if nothing does."""
    return "; ".join(
        f"{name}: {theirs.get(name, 'none'):.80}, the fleet's: "
        f"{ours.get(name, 'none'):.80}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
