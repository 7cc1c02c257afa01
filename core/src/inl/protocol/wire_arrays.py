"""Binary payloads of :mod:`inl.protocol.wire`: frames, masks, replies and progress.

Readers validate everything and raise only :class:`~inl.errors.ProtocolError`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from inl.errors import ProtocolError
from inl.progress import LoadStage
from inl.protocol.runner import Reply, pooled_reply
from inl.spec.step import Scores

if TYPE_CHECKING:
    from inl.spec.message import IntArray

Buffer = bytes | bytearray
PROGRESS = struct.Struct("<qqq")
STAGES = tuple(LoadStage)


def ints(payload: Buffer, what: str) -> IntArray:
    """Decode int32 words; the array shares the payload's memory."""
    if len(payload) % 4:
        raise ProtocolError(
            f"{what}: found {len(payload)} bytes, accepts whole int32 words"
        )
    return np.frombuffer(payload, "<i4").astype(np.int32, copy=False)


def words(array: IntArray) -> memoryview:
    """Encode an int32 array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array, "<i4").reshape(-1).data.cast("B")


def masks(step: int, rows: IntArray) -> memoryview:
    """Encode the token masks of a step, int32 [R, words]."""
    head = np.array([step, *rows.shape], np.int32)
    return words(np.concatenate([head, rows.reshape(-1)]))


def read_masks(payload: Buffer) -> tuple[int, IntArray]:
    """Decode the step and its token masks, int32 [R, words]."""
    data = ints(payload, "masks")
    if len(data) < 3:
        raise ProtocolError(f"masks: found {len(data)} words, needs at least 3")
    step, rows, mask_words = data[:3].tolist()
    if min(rows, mask_words) < 0 or len(data) != 3 + rows * mask_words:
        raise ProtocolError(
            f"masks of step {step}: found {len(data)} words for [{rows}, {mask_words}]"
        )
    return step, data[3:].reshape(rows, mask_words)


def reply(result: Reply) -> memoryview:
    """Encode the result of a step; scores follow S, samples, and N, ids of each.

    Hidden states [R, H] take the place of tokens, of which there are -H in the head.
    """
    if result.hidden is not None:
        count, width = result.hidden.shape
        head = np.array([result.step, count, -width], np.int32)
        values = np.ascontiguousarray(result.hidden, np.float32).view(np.int32)
        return words(np.concatenate([head, values.reshape(-1)]))
    rows, tokens_per_row = result.tokens.shape
    parts = [
        np.array([result.step, rows, tokens_per_row], np.int32),
        result.tokens.reshape(-1),
    ]
    if result.scores is not None:
        chosen, ids, values = result.scores
        parts += [
            np.array(ids.shape, np.int32),
            chosen.astype(np.float32).view(np.int32),
            ids.reshape(-1),
            values.astype(np.float32).reshape(-1).view(np.int32),
        ]
    return words(np.concatenate(parts).astype(np.int32, copy=False))


def read_reply(payload: Buffer) -> Reply:
    """Decode the result of a step."""
    data = ints(payload, "reply")
    if len(data) < 3:
        raise ProtocolError(f"reply: found {len(data)} words, needs at least 3")
    step, rows, tokens_per_row = data[:3].tolist()
    if rows >= 1 and tokens_per_row < 0 and len(data) == 3 - rows * tokens_per_row:
        return pooled_reply(step, data[3:].view(np.float32).reshape(rows, -1))
    samples = rows * tokens_per_row
    scored = data[3 + samples :] if min(rows, tokens_per_row) >= 1 else data
    count, top = scored[:2].tolist() if len(scored) > 1 else (0, 0)
    sizes = 3 + samples, 3 + samples + 2 + count * (1 + 2 * top)
    wrong = min(rows, tokens_per_row) < 1 or min(count, top) < 0
    if wrong or len(data) not in sizes:
        raise ProtocolError(
            f"reply of step {step}: found {len(data)} words for "
            f"[{rows}, {tokens_per_row}]"
        )
    tokens = data[3 : 3 + samples].reshape(rows, tokens_per_row)
    return Reply(
        step, tokens, _read_scores(scored[2:], count, top) if len(scored) else None
    )


def _read_scores(data: IntArray, samples: int, top: int) -> Scores:
    split = samples * (1 + top)
    return Scores(
        chosen=data[:samples].view(np.float32),
        ids=data[samples:split].reshape(samples, top),
        values=data[split:].view(np.float32).reshape(samples, top),
    )


def progress(done: int, total: int, stage: LoadStage) -> bytes:
    """Encode a progress report; the stage is sent as its index in ``LoadStage``."""
    return PROGRESS.pack(done, total, STAGES.index(stage))


def read_progress(payload: Buffer) -> tuple[int, int, LoadStage]:
    """Decode a progress report: done, total, stage."""
    if len(payload) != PROGRESS.size:
        raise ProtocolError(
            f"progress: found {len(payload)} bytes, accepts {PROGRESS.size}"
        )
    done, total, stage = PROGRESS.unpack(payload)
    if not 0 <= stage < len(STAGES):
        raise ProtocolError(
            f"progress: stage: found {stage}, accepts 0 to {len(STAGES) - 1}"
        )
    return done, total, STAGES[stage]
