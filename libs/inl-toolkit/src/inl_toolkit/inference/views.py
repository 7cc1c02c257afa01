"""Views of one engine: options, batches, its cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, final

from inl.config import EngineConfig
from inl.engine.options import GenerationOptions, make_requests

if TYPE_CHECKING:
    from pathlib import Path

    from inl.engine.inference_engine import Completion, InferenceEngine
    from inl.engine.options import Prompt
    from inl.engine.request_handle import RequestHandle
    from inl.executor.model_loader import LanguageModel
    from inl.text.tokenizer import Tokenizer


@final
class GenerationConfig(Mapping[str, Any]):
    """Options to pass to ``generate`` and ``stream``: ``generate(text, **config)``.

    Raises :class:`RequestError` for an unknown option or a value that is not accepted.
    """

    def __init__(self, **options: Unpack[GenerationOptions]) -> None:
        make_requests([0], options, room=1)
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
class KVCacheView:
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


KVCache = PagedKVCache = KVCacheView
"""Other names; every cache is paged."""


def SpeculativeDecoder(  # noqa: N802
    model: LanguageModel,
    draft_model: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    config: EngineConfig | None = None,
) -> InferenceEngine:
    """Return an engine whose steps verify several drafted tokens; answers are the same.

    draft_model: folder, GGUF file or known name of a small model with the same
    tokenizer; ``None`` drafts from the text itself. Sets ``EngineConfig.speculation``.
    """
    from inl.engine.inference_engine import InferenceEngine

    source = "ngram" if draft_model is None else "model"
    settings = replace(
        config or EngineConfig(), speculation=source, draft_model=draft_model
    )
    return InferenceEngine(model, tokenizer, settings)
