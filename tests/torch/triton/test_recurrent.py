"""Recurrent Triton kernels: a text in chunks, in a batch and in strided views."""

from __future__ import annotations

import pytest
import torch
from triton_place import DTYPES, PLACE

from inl.ops.recurrent import Decay, Taps

# isort: split
from inl.spec.step import Step
from inl_torch.triton.recurrent import recurrent

TOKENS = 11
OTHER = 5
"""Tokens of the other row of a batch."""
KEYS, HEADS, DIM, WIDTH, TAPS = 2, 4, 12, 20, 4
CHANNELS = 2 * KEYS * DIM + HEADS * WIDTH


def step_of(rows, padding=0):
    """A step of rows (slot, first position, tokens)."""
    counts = [count for _, _, count in rows]
    positions = [start + i for _, start, count in rows for i in range(count)]
    row = [r for r, count in enumerate(counts) for _ in range(count)]
    starts = [sum(counts[:r]) for r in range(len(counts) + 1)]
    used = [0, len(rows), len(row)]
    numbers = {
        "positions": positions + [0] * padding,
        "rows": row + [0] * padding,
        "starts": starts + [starts[-1]],
        "slots": [slot for slot, _, _ in rows] + [0],
        "used_counts": used,
    }
    arrays = {
        name: torch.tensor(numbers.get(name, [0]), dtype=torch.int32, device=PLACE)
        for name in Step._fields
    }
    return Step(**arrays | {"plan": ()})


class Layer:
    """A convolution and a delta rule on its channels, as of a Qwen3-Next layer."""

    def __init__(self, seed, dtype):
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=rng).to(PLACE)

        self.taps = Taps(normal(CHANNELS, 1, TAPS).to(dtype))
        self.decay = Decay(normal(HEADS), normal(HEADS))
        # Columns of wider tensors, so that tokens are not adjacent.
        self.x = normal(TOKENS + OTHER, CHANNELS + 3).to(dtype)[:, :CHANNELS]
        self.ab = normal(TOKENS + OTHER, 2 * HEADS).to(dtype)
        self.inputs = torch.full((4, TAPS - 1, CHANNELS), 9.0, device=PLACE).to(dtype)
        self.matrix = torch.full((4, HEADS, DIM, WIDTH), 9.0, device=PLACE)

    def __call__(self, step, tokens):
        x, ab = self.x[tokens], self.ab[tokens]
        mixed, inputs = recurrent.causal_conv(x, self.inputs, step, self.taps)
        q, k, v = mixed.split([KEYS * DIM, KEYS * DIM, HEADS * WIDTH], 1)
        count = mixed.shape[0]
        out, matrix = recurrent.delta_rule(
            q.view(count, KEYS, DIM), k.view(count, KEYS, DIM),
            v.view(count, HEADS, WIDTH), ab[:, :HEADS], ab[:, HEADS:], self.matrix,
            step, self.decay, tiled=False,
        )  # fmt: skip
        assert (inputs is self.inputs, matrix is self.matrix) == (True, True)
        return mixed, out


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_has_the_same_bits_in_chunks_and_in_a_batch(dtype, seed):
    wanted = Layer(seed, getattr(torch, dtype))
    both = wanted(step_of([(1, 0, TOKENS)]), slice(TOKENS))
    for sizes in ((2, 1, 8), (1,) * TOKENS):
        chunked, at = Layer(seed, getattr(torch, dtype)), 0
        for size in sizes:
            found = chunked(step_of([(1, at, size)]), slice(at, at + size))
            for got, want in zip(found, both, strict=True):
                assert torch.equal(got, want[at : at + size]), (sizes, at)
            at += size
        assert torch.equal(chunked.inputs[1], wanted.inputs[1])
        assert torch.equal(chunked.matrix[1], wanted.matrix[1])
    batched = Layer(seed, getattr(torch, dtype))
    found = batched(step_of([(1, 0, TOKENS), (3, 0, OTHER)]), slice(None))
    for got, want in zip(found, both, strict=True):
        assert torch.equal(got[:TOKENS], want)
    assert torch.equal(batched.matrix[1], wanted.matrix[1])


def test_padding_is_zeros_and_leaves_other_slots(seed):
    layer = Layer(seed, torch.float32)
    found = layer(step_of([(2, 0, 3)], padding=2), slice(5))
    for got in found:
        assert got[:3].abs().sum() > 0
        assert not got[3:].any()
    for table in (layer.inputs, layer.matrix):
        assert not table[0].any()
        assert (table[[1, 3]] == 9).all()
        assert (table[2] != 9).all()
