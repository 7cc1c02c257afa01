"""What an engine core reports of its steps."""

from __future__ import annotations

from typing import NamedTuple

# Part of what the room exports.
from inl.kv.kv_events import BlocksCleared as BlocksCleared
from inl.kv.kv_events import BlocksRemoved as BlocksRemoved
from inl.kv.kv_events import BlocksStored as BlocksStored
from inl.kv.kv_events import KVEvent as KVEvent
from inl.spec.step import Bucket


class StepRecord(NamedTuple):
    """Composition of one submitted step."""

    step: int
    bucket: Bucket
    tokens: int
    """Tokens computed, without padding."""
    rows: int
    decode_rows: int
    requests: tuple[int, ...]
    """Request id of each row."""


class Stats(NamedTuple):
    """Totals since the engine started."""

    steps: int
    """Steps submitted."""
    tokens: int
    """Tokens computed, without padding."""
    rows: int
    """Rows of all steps: ``rows / steps`` is the mean batch size."""
    preemptions: int
    """Times that a request lost its blocks to an earlier one."""
    prefix_hit_tokens: int
    """Tokens taken from the prefix cache."""
    mask_seconds: float = 0.0
    """Time to compute token masks on the host."""
    mask_wait_seconds: float = 0.0
    """Part of it for which a step waited; the device worked during the rest."""
