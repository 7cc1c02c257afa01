"""Token embedding as a Triton kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.ops.embedding import Embedding
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, power, refuse_dtype
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.tuning import Tuning

BLOCK = 1024


@triton.jit
def _lookup(
    tokens: tensor, weight: tensor, y: tensor, width: tensor, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(tokens + row).to(tl.int64) * width
    x = tl.load(weight + source + column, mask=column < width)
    tl.store(y + row * width + column, x, mask=column < width)


def embedding(tokens: torch.Tensor, w: Embedding, *, tuning: Tuning) -> torch.Tensor:
    count, width = tokens.shape[0], w.weight.shape[1]
    y = torch.empty((count, width), dtype=w.weight.dtype, device=tokens.device)
    block = min(power(width), BLOCK)
    _lookup[(count, -(-width // block))](
        tokens, w.weight, y, width, BLOCK=block, PDL=tuning.uses_pdl(count),
        num_warps=4, **tuning.launch(count),
    )  # fmt: skip
    return y


def _refuse(tokens: Any, w: Any, *, tuning: Tuning) -> str | None:  # noqa: ARG001
    return refuse_dtype(w.weight)


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the embedding kernel."""
    run = partial(embedding, tuning=tuning)
    refuse = partial(_refuse, tuning=tuning)
    return (
        Kernel(
            "embedding",
            "triton",
            run,
            refuse=refuse,
            invariant=True,
            preference=PREFERENCE,
        ),
    )
