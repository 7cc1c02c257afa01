"""A model with packed weights against the same model with dequantized weights."""

from __future__ import annotations

from typing import final

import numpy as np
import pytest
import torch
from triton_place import PLACE

from inl.backend.base import Traits
from inl.backend.host import host_memory
from inl.checkpoints.blocks.encode import encode
from inl.device import Device
from inl.dtypes import HostArray, widen
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.spec.tree import leaves

# isort: split
from inl_torch import triton
from inl_torch.backend import TorchBackend
from inl_torch.triton.quantized import products as packed_products
from inl_torch.triton.tuning import Tuning

LIMITS = Limits(slots=2, blocks=(8,), block_size=4, max_blocks_per_seq=4, vocab=97)


@final
class Packing(TorchBackend):
    """Triton kernels, with or without those for packed weights."""

    traits = Traits(dtypes=("float32",))

    def __init__(self, packs):
        self.device, self.packs = Device("cpu:0"), packs
        self.place = torch.device(PLACE)

    def memory(self):
        return host_memory()

    def kernels(self):
        yield from super().kernels()
        yield from triton.kernels(Tuning(processors=1))
        if self.packs:
            yield from packed_products.kernels(Tuning(processors=1))


def quantized(tiny, gguf, form):
    """The model's matrices quantized to ``form``, and the embedding to Q8_0."""
    for name, array in tiny.checkpoint._tensors.items():
        if len(array.shape) != 2:
            continue
        kind = "q8_0" if "embed" in name else form
        if kind == "mxfp8":
            tiny.checkpoint._tensors[name] = encode(np.asarray(array.data), kind)
            continue
        numbers = gguf.quants.quantize(
            np.asarray(array.data), gguf.GGMLQuantizationType[kind.upper()]
        )
        tiny.checkpoint._tensors[name] = HostArray(numbers, kind, array.shape)
    return tiny


def logits(runner, rows):
    """Logits of a prompt in one step, then of one token per step."""
    table = list(range(1, 5))
    runner.submit(admit_frame(1, [table], groups=1, max_blocks_per_seq=4))
    found = []
    for number, tokens in enumerate(rows, 1):
        bucket = Bucket(len(tokens), 1, len(tokens))
        frame = step_frame(
            bucket, [Row(1, tokens)], step=number, groups=1, block_size=4,
            decode_rows=0,
        )  # fmt: skip
        found.append(widen(runner.logits(frame)).reshape(len(tokens), -1))
    return np.concatenate(found)


@pytest.mark.parametrize("form", ["q4_1", "mxfp8"])
def test_a_model_of_packed_weights(form, tiny_llama, seed):
    gguf = pytest.importorskip("gguf")
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1}
    tiny = quantized(tiny_llama(seed, **sizes), gguf, form)
    found = {}
    for packs in (False, True):
        backend = Packing(packs)
        runner = tiny.runner(backend, "float32", LIMITS)
        groups = [g for g in leaves(runner.loaded.groups) if g.group.op != "embedding"]
        kept = {g.layout for g in groups if "norm" not in g.group.op}
        assert ("packed" in kept) == packs, kept
        found[packs] = logits(runner, ([5, 17], [8]))
    size = np.abs(found[False]).max()
    assert np.abs(found[True] - found[False]).max() < 1e-5 * size, f"seed {seed}"
