"""Applies the engines' numbered messages about cached prompt blocks to the router."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from inl.fleet.block_feed import unpacked
from inl.fleet.router import ASSUMED_TIER_COSTS

if TYPE_CHECKING:
    from collections import Counter

    from inl.fleet.engine_link import EngineLink
    from inl.fleet.router import Router
    from inl.serve.frontends.messages import Prefixes

log = logging.getLogger("inl.serve")


class PrefixNews:
    """Applies messages to the router's index. counts: totals to add to."""

    def __init__(self, router: Router, counts: Counter[str]) -> None:
        self._router, self._counts = router, counts
        self._numbers: dict[int, int] = {}
        """Of the next message of each engine that is connected."""

    def apply(self, engine: EngineLink, news: Prefixes) -> None:
        """Apply a message; asks for all blocks if one before it is missing."""
        expected = self._numbers.get(engine.number)
        if news.is_whole:
            levels = [unpacked(keys) for keys in news.levels]
            self._router.report(engine.number, levels)
            if news.states is not None:
                self._router.index.report_states(engine.number, unpacked(news.states))
        elif expected is None:
            return  # all of them are on their way
        elif news.number < expected:
            return  # already applied
        elif news.number > expected:
            log.warning(
                "engine %s: missed %d messages of what its cache has; asks for all",
                engine.address, news.number - expected,
            )  # fmt: skip
            self._counts["prefix_gaps"] += 1
            del self._numbers[engine.number]
            engine.follow()
            return
        else:
            index = self._router.index
            index.withdraw(engine.number, unpacked(news.removed))
            for level, keys in enumerate(news.levels):
                index.report(engine.number, unpacked(keys), level)
            if news.states is not None:
                left = unpacked(news.left)
                index.report_states(engine.number, unpacked(news.states), left)
        self._numbers[engine.number] = news.number + 1
        if news.costs:
            self._router.loads[engine.number].tier_costs = [
                cost or assumed
                for cost, assumed in zip(news.costs, ASSUMED_TIER_COSTS, strict=True)
            ]

    def leave(self, engine: EngineLink) -> None:
        """Forget an engine."""
        self._numbers.pop(engine.number, None)
