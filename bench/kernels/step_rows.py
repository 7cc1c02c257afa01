"""Rows of the ops around a model's layers: message, admissions, rotation table.

Plain torch is the eager kernel. Tables change with every call, so results are not
compared here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from inl.ops.rope import RopeScaling
from inl.ops.step import empty_tables
from inl.spec import message
from inl.spec.step import Bucket, Tables
from inl_torch.eager import rope, step
from kernels.rows import BLOCK, Row

WIDTH = 128
"""Blocks per slot, enough for all timed calls."""


def on_device(frame: Any, slots: int) -> tuple[torch.Tensor, Tables]:
    found = empty_tables(groups=1, slots=slots + 1, max_blocks_per_seq=WIDTH)
    tables = Tables(*(torch.from_numpy(np.asarray(part)).cuda() for part in found))
    return torch.from_numpy(np.asarray(frame)).cuda(), tables


def make_step(rows: int) -> Row:
    """Each row decodes one token, and one in 16 rows gets a new block."""
    bucket = Bucket(rows, rows)
    entries = [message.Row(slot + 1, [-1], [0.5]) for slot in range(rows)]
    cells = [
        message.BlockTableUpdate(0, slot + 1, 1, slot) for slot in range(0, rows, BLOCK)
    ]
    frame = message.step_frame(
        bucket, entries, cells, step=3, groups=1, block_size=BLOCK, decode_rows=rows
    )
    attrs = {"bucket": bucket, "block_size": BLOCK}
    return Row(
        "make_step", f"{rows} rows", lambda: on_device(frame, rows),
        lambda run, *args: run(*args, **attrs),
        lambda *args: step.make_step(*args, **attrs),
        read=4 * len(frame) + 4 * rows * (WIDTH + 4), outputs=4 * rows * (WIDTH + 12),
        exact=False,
    )  # fmt: skip


def admit(count: int, slots: int) -> Row:
    frames = np.stack([
        message.admit_frame(
            slot, [[1] * 8], groups=1, max_blocks_per_seq=WIDTH, length=100, last=7,
            temperature=0.7,
        )
        for slot in range(1, count + 1)
    ])  # fmt: skip
    return Row(
        "admit", f"{count} of {slots} slots", lambda: on_device(frames, slots),
        lambda run, *args: run(*args), step.admit,
        read=frames.nbytes, outputs=frames.nbytes, exact=False,
    )  # fmt: skip


def rope_table(tokens: int, dim: int) -> Row:
    attrs = {"dim": dim, "theta": 10000.0, "scaling": RopeScaling()}
    return Row(
        "rope_table", f"{tokens}x{dim}",
        lambda: (torch.randint(8192, (tokens,), dtype=torch.int32, device="cuda"),),
        lambda run, at: run(at, **attrs), lambda at: rope.rope_table(at, **attrs),
        outputs=4 * tokens * dim,
    )  # fmt: skip


ROWS = (make_step(1), make_step(512), admit(1, 512), admit(16, 512),
        *(rope_table(tokens, 128) for tokens in (1, 2048)))  # fmt: skip
