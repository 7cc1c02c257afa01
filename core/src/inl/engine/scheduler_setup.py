"""Settings of the scheduler: of the config, the model and the runner together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.checkpoints.digest import model_digest
from inl.executor.model_loader import is_recurrent, is_replayed
from inl.scheduling.plan import SchedulerConfig

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.protocol.runner import Limits


def scheduler_config(
    model: LanguageModel, config: EngineConfig, limits: Limits, *, context: int
) -> SchedulerConfig:
    """Return the scheduler's settings for a model and a runner with these limits.

    context: maximum number of tokens of prompt and output.
    """
    checkpoint = model.checkpoint
    return SchedulerConfig(
        token_budget=(
            config.token_budget * limits.data_ranks
            if config.token_budget
            else limits.token_budget
        ),
        inter_token_ms=config.inter_token_ms,
        max_rows=config.max_batch,
        context=context,
        eos_ids=frozenset(checkpoint.eos_token_ids),
        use_kv_cache=config.use_kv_cache,
        prefix_cache=config.prefix_cache,
        replay=is_replayed(model),
        recurrent=is_recurrent(model),
        recomputes_block=config.has_draft_head,
        decode_steps=limits.decode_steps,
        model_digest=model_digest(checkpoint),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )
