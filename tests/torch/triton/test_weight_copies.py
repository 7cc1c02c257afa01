"""A model of 4 bits whose weights have copies in E4M3, as an engine loads it."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from triton_place import PDL, PLACE

from inl.backend.base import PackedKernels, Traits
from inl.backend.host import host_memory
from inl.backend.provisional import WeightCopies
from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import widen
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

# isort: split
from inl_torch.backend import TorchBackend
from inl_torch.triton.float8 import products as float8
from inl_torch.triton.int4 import products as int4
from inl_torch.triton.tuning import Tuning

TUNING = Tuning(processors=1, pdl=PDL)
LIMITS = Limits(slots=2, blocks=(8,), block_size=4, max_blocks_per_seq=4, vocab=96)
FEW, MANY = [5, 17], [8, 3, 1, 60, 2, 7]


@final
class Copying(TorchBackend):
    """Kernels of weights of 4 bits, with and without copies."""

    traits = Traits(dtypes=("bfloat16",))

    def __init__(self) -> None:
        self.device, self.place = Device("cpu:0"), torch.device(PLACE)

    def memory(self):
        return host_memory()

    def offers(self, kind):
        if kind is PackedKernels:
            return PackedKernels(lambda: int4.int4_kernels(TUNING))
        if kind is WeightCopies:
            kernels = int4.int4_kernels(TUNING, int4.copied_int4)
            return WeightCopies(lambda: kernels, int4.copied_bytes)
        return super().offers(kind)


def logits(runner, tokens, number):
    """Logits of a prompt in one step of slot ``number``."""
    table = [[*range(1, 5)]]
    runner.submit(admit_frame(number, table, groups=1, max_blocks_per_seq=4))
    bucket = Bucket(len(tokens), 1, len(tokens))
    frame = step_frame(
        bucket, [Row(number, tokens)], step=1, groups=1, block_size=4, decode_rows=0
    )
    return widen(runner.logits(frame)).reshape(len(tokens), -1)


def test_copies_change_no_bit_of_a_step(seed, monkeypatch):
    """Steps of many rows multiply the copies, where others decode to the same E4M3."""
    for module in (int4, float8):
        monkeypatch.setattr(module, "MAX_STREAMED", 3)
    monkeypatch.setattr(int4, "LEAST_COPIED", 4)
    monkeypatch.setattr(int4, "LEAST_ROUNDED", 64)
    hf, tensors = tiny_llama(
        np.random.default_rng(seed), layers=1, hidden=64, inner=128
    )
    checkpoint = MemoryCheckpoint(hf, tensors)
    language = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    found, decoded = {}, []
    rounded = int4.rounded
    monkeypatch.setattr(int4, "rounded", lambda w: decoded.append(w) or rounded(w))
    for copies in (True, False):
        config = EngineConfig(
            quantize="int4", weight_copies=copies, allow_hosted=True, dtype="bfloat16"
        )
        runner = start_runner(language, Copying(), config, limits=LIMITS)
        layer = runner.loaded.weights.layers[0]
        matrices = layer.mlp.mlp.gate_up, layer.mlp.mlp.down
        assert [each.copy is not None for each in matrices] == [copies] * 2
        loading = len(decoded)
        assert bool(loading) == copies
        found[copies] = [logits(runner, FEW, 1)]
        assert len(decoded) == loading, "few rows"
        found[copies].append(logits(runner, MANY, 1))
        assert (len(decoded) > loading) != copies
        decoded.clear()
        runner.close()
    for with_copies, without in zip(found[True], found[False], strict=True):
        assert np.isfinite(with_copies).all()
        np.testing.assert_array_equal(with_copies, without)
    assert not np.array_equal(found[True][0][0], found[True][1][0])
