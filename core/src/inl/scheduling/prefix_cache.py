"""Prefix caching: the block keys of requests, and publishing of collected blocks."""

from __future__ import annotations

from inl.scheduling.block_hash import extend_block_hashes, root_hash
from inl.scheduling.kv_cache_manager import KVCacheManager
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request


class PrefixCache:
    """Computes the keys of requests' blocks and registers full ones.

    Only blocks whose tokens are collected are published.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self._config = config
        self._kv_cache = kv_cache

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
        return self._config.prefix_cache or bool(request.sample_group)

    def _salt(self, request: Request) -> str:
        if self._config.prefix_cache:
            return request.cache_salt
        return f"{request.cache_salt}\0{request.sample_group}"

    def publish(self, request: Request, stop: int) -> None:
        """Publish the full blocks of a request's first ``stop`` tokens."""
        if not self.serves(request):
            return
        if self._config.replay:
            stop = min(stop, request.prompt_tokens)
        full = stop // self._kv_cache.block_size
        if full > request.published_blocks:
            keys = self.keys(request, full)
            for index in range(request.published_blocks, full):
                self._kv_cache.publish(request.block_table, index, keys[index])
            request.published_blocks = full
