"""Settings of the scheduler: of the config, the model and the runner together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inl.checkpoints.digest import model_digest
from inl.executor.model_loader import is_recurrent, is_replayed
from inl.scheduling.plan import SchedulerConfig

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.protocol.runner import Limits

DEVICE_SNAPSHOTS: Final = {"snapshot_tokens": 8192, "snapshot_interval": 32_768}
"""A copy of the state of 24 layers of 1,024 stops an H100 for about 10 ms, in which it
computes 2,000 tokens."""


def scheduler_config(
    model: LanguageModel,
    config: EngineConfig,
    limits: Limits,
    *,
    context: int,
    is_apart: bool = False,
) -> SchedulerConfig:
    """Return the scheduler's settings for a model and a runner with these limits.

    context: maximum number of tokens of prompt and output. is_apart: whether the device
    computes fast and has memory of its own: snapshots of state, whose copies it waits
    for, then pay for long prompts only.
    """
    checkpoint = model.checkpoint
    snapshots = DEVICE_SNAPSHOTS if is_apart else {}
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
        **snapshots,
    )
