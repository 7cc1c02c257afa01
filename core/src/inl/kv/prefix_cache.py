"""Prefix caching: the block keys of requests, and publishing of collected blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from inl.kv.block_hash import extend_block_hashes, root_hash
from inl.kv.kv_cache_manager import KVCacheManager
from inl.kv.kv_events import BlocksStored

if TYPE_CHECKING:
    from inl.scheduling.plan import SchedulerConfig
    from inl.scheduling.request import Request


class PrefixCache:
    """Computes the keys of requests' blocks and registers full ones.

    Only blocks whose tokens are collected are published. A request that would compute
    what a step in flight computes waits for it.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._computing: dict[int, list[bytes]] = {}
        """Step in flight -> keys of the blocks that it fills."""
        self._newest: dict[bytes, int] = {}
        """Key -> newest step in flight that fills such a block. With recurrent state,
        only blocks at whose end a snapshot is taken."""

    def keys(self, request: Request, count: int) -> list[bytes]:
        """Return the keys of a request's first ``count`` full blocks.

        Requests that share no blocks have no keys.
        """
        if not self.serves(request):
            return []
        block_size = self._kv_cache.block_size
        if not request.block_hashes:
            request.block_hashes = [
                root_hash(
                    model_digest=self._config.model_digest,
                    adapter_digest=request.adapter_digest,
                    cache_salt=self._salt(request),
                    block_size=block_size,
                )
            ]
        extend_block_hashes(
            request.block_hashes, request.tokens, block_size, count, request.embeddings
        )
        return request.block_hashes[1 : count + 1]

    def serves(self, request: Request) -> bool:
        """Whether a request shares blocks: without a prefix cache, with its group."""
        # A draft head has no hidden states of a pooled request to fill its cache from.
        headless = request.pooled and self._config.recomputes_block
        if headless or (self._config.recurrent and self._kv_cache.snapshots is None):
            return False
        if request.pools_all:
            return False
        return self._config.prefix_cache or bool(request.sample_group)

    def _salt(self, request: Request) -> str:
        if self._config.prefix_cache:
            return request.cache_salt
        return f"{request.cache_salt}\0{request.sample_group}"

    def begin(self, request: Request, step: int) -> None:
        """Record that ``step`` computes a request's tokens up to the scheduled one."""
        if self._config.recurrent:
            return  # blocks are shared with a snapshot only
        full = self._full_blocks(request, request.scheduled)
        if full > request.published_blocks:
            keys = self.keys(request, full)[request.published_blocks :]
            self._add(keys, step)

    def begin_snapshot(self, request: Request, stop: int, step: int) -> bool:
        """Record that ``step`` computes the state after ``stop`` known tokens.

        Returns whether a snapshot of it is of use: there is none yet.
        """
        (key,) = self.keys(request, stop // self._kv_cache.block_size)[-1:]
        snapshots = self._kv_cache.snapshots
        if snapshots is None or snapshots.holds(key) or key in self._newest:
            return False
        self._add([key], step)
        return True

    def _add(self, keys: Sequence[bytes], step: int) -> None:
        self._computing.setdefault(step, []).extend(keys)
        self._newest.update(dict.fromkeys(keys, step))

    def complete_step(self, step: int) -> None:
        """Record that ``step`` is collected."""
        for key in self._computing.pop(step, ()):
            if self._newest.get(key) == step:
                del self._newest[key]

    def must_wait(self, keys: list[bytes], tokens: int) -> bool:
        """Whether steps in flight compute enough of what a request lacks.

        See :attr:`~inl.scheduling.plan.SchedulerConfig.wait_tokens`.
        keys: of its leading blocks. tokens: number of its tokens to compute or share.
        A wait ends with the steps in flight.
        """
        if self._newest.keys().isdisjoint(keys):
            return False
        cached = self._kv_cache.restorable_prefix(keys)
        later = keys[cached:]
        if self._config.recurrent:
            known = (at for at, key in enumerate(later, 1) if key in self._newest)
            coming = max(known, default=0)
        else:
            coming = next(
                (at for at, key in enumerate(later) if key not in self._newest),
                len(later),
            )
        size = self._kv_cache.block_size
        lacks = tokens - cached * size
        return coming * size >= max(self._config.wait_tokens, lacks / 2)

    def _full_blocks(self, request: Request, stop: int) -> int:
        """Return how many blocks of the first ``stop`` tokens may be published."""
        if not self.serves(request):
            return 0
        if self._config.replay:
            stop = min(stop, request.prompt_tokens)
        return stop // self._kv_cache.block_size

    def publish(self, request: Request, stop: int) -> None:
        """Publish the full blocks of a request's first ``stop`` tokens."""
        full = self._full_blocks(request, stop)
        if full > request.published_blocks:
            keys = self.keys(request, full)
            added = [
                index
                for index in range(request.published_blocks, full)
                if self._kv_cache.publish(request.block_table, index, keys[index])
            ]
            request.published_blocks = full
            self.announce(request, keys, added)

    def announce(
        self, request: Request, keys: Sequence[bytes], indexes: Sequence[int]
    ) -> None:
        """Report blocks of a request that can be shared, in order.

        Not those that its tokens do not name: with a salt, or embeddings.
        """
        on_event, size = self._kv_cache.on_event, self._kv_cache.block_size
        if on_event is None or request.embeddings or self._salt(request):
            return
        for _, run in groupby(enumerate(indexes), lambda each: each[1] - each[0]):
            found = [index for _, index in run]
            start, stop = found[0], found[-1] + 1
            on_event(
                BlocksStored(
                    keys[start:stop],
                    keys[start - 1] if start else None,
                    request.tokens[start * size : stop * size],
                    size,
                    request.adapter_digest,
                )
            )
