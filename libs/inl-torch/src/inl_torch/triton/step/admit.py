"""Setting slots from admissions, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.message import ADMISSION_WORD
from inl.spec.step import PARAMS, Tables
from inl_torch.triton.common import PREFERENCE

BLOCK = 1024

SLOT = tl.constexpr(ADMISSION_WORD.slot)
LENGTH = tl.constexpr(ADMISSION_WORD.length)
LAST = tl.constexpr(ADMISSION_WORD.last)
ADAPTER = tl.constexpr(ADMISSION_WORD.adapter)
PARAMS_AT = tl.constexpr(ADMISSION_WORD.params)
BLOCKS_AT = tl.constexpr(ADMISSION_WORD.blocks)


@triton.jit
def _admit(
    messages: tensor, words: tensor, blocks: tensor, lengths: tensor, last: tensor,
    adapters: tensor, settings: tensor, counts: tensor, bias: tensor,
    slot_count: tensor, width: tensor, vocab: tensor, G: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Each program sets some columns of every table that has so many, of one slot."""
    message = messages + tl.program_id(1).to(tl.int64) * words
    slot = tl.load(message + SLOT).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = at == 0
    given = message + at
    tl.store(lengths + slot + at, tl.load(given + LENGTH, mask=first), mask=first)
    tl.store(last + slot + at, tl.load(given + LAST, mask=first), mask=first)
    tl.store(adapters + slot + at, tl.load(given + ADAPTER, mask=first), mask=first)
    known = at < COLUMNS
    bits = tl.load(given + PARAMS_AT, mask=known, other=0)
    setting = bits.to(tl.float32, bitcast=True)
    tl.store(settings + slot * COLUMNS + at, setting, mask=known)
    for group in tl.static_range(0, G):
        inside = at < width
        block = tl.load(given + BLOCKS_AT + group * width, mask=inside, other=0)
        row = (group * slot_count + slot) * width
        tl.store(blocks + row + at, block, mask=inside)
    tl.store(counts + slot * vocab + at, tl.zeros_like(at), mask=at < vocab)
    tl.store(bias + slot * vocab + at, tl.zeros_like(at).to(tl.float32), at < vocab)


def admit(messages: torch.Tensor, tables: Tables) -> Tables:
    messages = messages.contiguous()
    count, words = messages.shape
    groups, slots, width = tables.blocks.shape
    vocab = tables.token_counts.shape[1]
    programs = -(-max(width, vocab, len(PARAMS)) // BLOCK)
    _admit[(programs, count)](
        messages, words, tables.blocks, tables.lengths, tables.last, tables.adapters,
        tables.params, tables.token_counts, tables.bias, slots, width, vocab, G=groups,
        COLUMNS=len(PARAMS), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return tables


KERNELS = (Kernel("admit", "triton", admit, invariant=True, preference=PREFERENCE),)
