"""Views of one engine: options, batches, its cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, final

from inl.engine.options import GenerationOptions, make_request
from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.engine.inference_engine import Completion, InferenceEngine
    from inl.engine.options import Prompt
    from inl.engine.request_handle import RequestHandle


@final
class GenerationConfig(Mapping[str, Any]):
    """Options to pass to ``generate`` and ``stream``: ``generate(text, **config)``.

    Raises :class:`RequestError` for an unknown option or a value that is not accepted.
    """

    def __init__(self, **options: Unpack[GenerationOptions]) -> None:
        make_request([0], options, room=1)
        self._options: dict[str, Any] = dict(options)

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


@final
class ContinuousBatcher:
    """Requests that share the batches of an engine.

    The engine batches all requests continuously, whoever makes them; this keeps those
    of one caller together.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.handles: list[RequestHandle] = []

    def submit(
        self, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> RequestHandle:
        """Queue a prompt; raises as :meth:`InferenceEngine.submit`."""
        handle = self.engine.submit(prompt, **options)
        self.handles.append(handle)
        return handle

    def run(self) -> list[Completion]:
        """Compute until all have finished; completions in the order of submission."""
        while not all(handle.completed for handle in self.handles):
            self.engine.step()
        done, self.handles = self.handles, []
        return [handle.completion() for handle in done]


BatchScheduler = ContinuousBatcher
"""Another name; there is one scheduler."""


@final
class KVCache:
    """Blocks of an engine's paged cache, as they are now; one entry per cache group."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._engine.runner.limits.block_size

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks."""
        return self._engine.runner.limits.blocks

    @property
    def available_blocks(self) -> tuple[int, ...]:
        """Blocks that a new sequence may take: free, or cached and not in use."""
        manager = self._engine.core.scheduler.kv_cache
        return tuple(pool.available_blocks for pool in manager.pools)

    @property
    def cached_blocks(self) -> tuple[int, ...]:
        """Blocks of prompts that later prompts can share."""
        manager = self._engine.core.scheduler.kv_cache
        return tuple(pool.cached_blocks for pool in manager.pools)


PagedKVCache = KVCache
"""Another name; every cache is paged."""


def SpeculativeDecoder(*_: Any, **__: Any) -> NoReturn:  # noqa: N802
    """Raise :class:`RequestError`: the engine does not decode speculatively."""
    raise RequestError(
        "SpeculativeDecoder: the engine verifies no drafts; accepted: "
        "InferenceEngine, which gives the same answers without them"
    )
