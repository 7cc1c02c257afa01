"""Correctness check for ``cuda_serve.py``: two layers against a plain torch model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cuda_engines import Serving, load, random_prompts
from plain_llama import logits as plain_logits

from inl.dtypes import widen
from inl.runners.local_runner import LocalRunner
from inl.spec.message import Row, admit_frame, step_frame


def check(backend: Any, name: str) -> bool:
    """Compare logits of two layers with plain torch, after a prompt in three chunks.

    Once with buckets of several rows, once with those of one prompt.
    """
    loaded, checkpoint = load(backend, name, 2)
    config, rng = loaded.config, np.random.default_rng()
    ids = random_prompts(rng, 1, 2900, config.vocab_size)[0]
    held = {
        key.replace("layers.0", f"layers.{index}"): torch.from_numpy(
            checkpoint.tensor(key).data.view(np.int16).copy()
        ).view(torch.bfloat16).to(backend.place)
        for key in checkpoint.names() for index in range(2)
    }  # fmt: skip
    place = torch.tensor(ids, device=backend.place)
    wide = {key: value.float() for key, value in held.items()}
    truth = plain_logits(config, wide, place).cpu()

    def away(x: torch.Tensor) -> float:
        return float((x.float().cpu() - truth).norm() / truth.norm())

    plain = away(plain_logits(config, held, place))
    serving = Serving.shape(backend, loaded, 2, 4096, 8192)
    ours = [
        away(chunked(serving.runner, ids, slot, backend.traits.block_size))
        for slot in (1, 2)
    ]
    serving.close()
    right = max(ours) < 2 * plain
    print(f"two layers of {name}: from plain float32, INL {ours[0]:.3%}, as a lone "
          f"prompt {ours[1]:.3%}, plain bfloat16 {plain:.3%}: "
          f"{'right' if right else 'WRONG'}")  # fmt: skip
    return right


def chunked(runner: LocalRunner, ids: list[int], slot: int, size: int) -> torch.Tensor:
    """Logits [V] after ``ids``; slot 2 uses buckets of one row where they exist."""
    limits = runner.limits
    first = 1 + (slot - 1) * limits.max_blocks_per_seq
    table = [list(range(first, first + -(-len(ids) // size)))]
    runner.submit(
        admit_frame(
            slot,
            table,
            groups=1,
            max_blocks_per_seq=limits.max_blocks_per_seq,
            length=0,
            last=0,
        )
    )
    buckets = sorted(limits.buckets, key=lambda b: b.rows if slot == 2 else -b.rows)
    for part in (ids[:2100], ids[2100:-1], ids[-1:]):
        bucket = next(b for b in buckets if b.tokens >= len(part))
        rows = [Row(slot, part)]
        frame = step_frame(
            bucket, rows, step=0, groups=1, block_size=size, decode_rows=0
        )
        found = widen(runner.logits(frame))[0]
    return torch.from_numpy(found.astype(np.float32))
