"""Admission of sequences to slots, as one Triton kernel."""

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
    adapters: tensor, param_table: tensor, counts: tensor, bias: tensor,
    slot_count: tensor, width: tensor, vocab: tensor, G: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Set some columns of all tables for one slot."""
    message = messages + tl.program_id(1).to(tl.int64) * words
    slot = tl.load(message + SLOT).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = column == 0
    fields = message + column
    length = tl.load(fields + LENGTH, mask=first)
    adapter = tl.load(fields + ADAPTER, mask=first)
    tl.store(lengths + slot + column, length, mask=first)
    tl.store(last + slot + column, tl.load(fields + LAST, mask=first), mask=first)
    tl.store(adapters + slot + column, adapter, mask=first)
    is_param = column < COLUMNS
    bits = tl.load(fields + PARAMS_AT, mask=is_param, other=0)
    param = bits.to(tl.float32, bitcast=True)
    tl.store(param_table + slot * COLUMNS + column, param, mask=is_param)
    for group in tl.static_range(0, G):
        inside = column < width
        block = tl.load(fields + BLOCKS_AT + group * width, mask=inside, other=0)
        row = (group * slot_count + slot) * width
        tl.store(blocks + row + column, block, mask=inside)
    tl.store(counts + slot * vocab + column, tl.zeros_like(column), mask=column < vocab)
    tl.store(
        bias + slot * vocab + column,
        tl.zeros_like(column).to(tl.float32),
        column < vocab,
    )


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
