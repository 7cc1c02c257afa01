"""GGUF files of kinds with a codebook, and of ternary kinds, on the native kernels."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest

from inl import EngineConfig
from inl.checkpoints.blocks.codebooks import FALLBACK_DTYPES
from inl.checkpoints.blocks.dtypes import BLOCKS, dequantize
from inl.dtypes import SIZES, widen
from inl.errors import MissingPackage
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.protocol.runner import Limits
from inl.runners.local_runner import start_runner
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import plain_logits, tiny_llama
from inl_cpu import matrix

LIMITS = Limits(3, (9,), 16, 4, 256)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
SIZE, HEADS, VOCABULARY = 256, 4, 96
KINDS = (*FALLBACK_DTYPES, "tq1_0", "tq2_0")


def blocks_of(rng, kind, values):
    """Random blocks with about the spread of ``values``, as rows of bytes."""
    elements, size = BLOCKS[kind]
    raw = rng.integers(0, 256, (values.size // elements, size), np.uint8)
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    if kind == "tq2_0":
        raw ^= raw & raw >> 1 & 0x55  # no code is 3, which stands for 2

    def scaled(scale):
        bits = int(np.float16(scale).view(np.uint16))
        if kind == "iq1_m":
            raw[:, 49:56:2] &= 15
            nibbles = [(bits >> at & 15) << 4 for at in (0, 4, 8, 12)]
            raw[:, 49:56:2] |= np.array(nibbles, np.uint8)
        else:
            at = {"tq1_0": 52, "tq2_0": 64}.get(kind, 0)
            raw[:, at], raw[:, at + 1] = bits & 255, bits >> 8
        return gguf.dequantize(raw, type_).std()

    scaled(values.std() / scaled(1.0))
    return raw.reshape(len(values), -1), type_


@pytest.fixture(scope="module", params=KINDS)
def file(request, tmp_path_factory):
    rng = np.random.default_rng(KINDS.index(request.param))
    _, tensors = tiny_llama(
        rng, hidden=SIZE, inner=SIZE, heads=HEADS, kv_heads=2, head_dim=SIZE // HEADS,
        vocab=VOCABULARY,
    )  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(256 + at) for at in range(VOCABULARY)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, values in tensors.items():
        stored = names.get_name(name, (".weight", ".bias"))
        if values.ndim == 2:
            raw, type_ = blocks_of(rng, request.param, values)
            writer.add_tensor(stored, raw, raw_dtype=type_)
        else:
            writer.add_tensor(stored, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(file, device, dtype):
    config = EngineConfig(backend=device, dtype=dtype)
    runner = start_runner(open_model(file), make_backend(device), config, limits=LIMITS)
    return prompt_logits(runner, IDS)


def exact(file):
    """float64 logits of the decoded weights."""
    checkpoint = open_model(file).checkpoint
    weights = {}
    for name in checkpoint.names():
        array = checkpoint.tensor(name)
        values = widen(array) if array.dtype in SIZES else dequantize(array)
        weights[name] = values.astype(np.float64)
    return plain_logits(checkpoint.config, weights, IDS)[-1]


def test_logits_equal_float64_of_the_decoded_weights(file, monkeypatch):
    def decoded(array, *_):
        raise AssertionError(f"{array.dtype} was decoded")

    monkeypatch.setattr(matrix, "convert", decoded)
    want = exact(file)
    error = np.abs(logits(file, "cpu", "float32") - want).max()
    assert error < 1e-4 * np.abs(want).max()


def test_logits_in_bfloat16_err_no_more_than_the_reference(file, monkeypatch):
    monkeypatch.setenv("INL_CPU_INPUTS", "int16")
    want = exact(file)
    ours, reference = (
        np.abs(logits(file, device, "bfloat16") - want).max()
        for device in ("cpu", "reference")
    )
    assert ours <= 2 * reference + 2.0**-7 * np.abs(want).max()


def test_a_missing_package_is_named(file, monkeypatch):
    kind = file.parent.name.rstrip("0123456789")
    monkeypatch.setitem(sys.modules, "gguf", None)
    if kind.startswith("tq"):
        logits(file, "cpu", "float32")
        return
    with pytest.raises(MissingPackage, match=r"dtype iq.*\[gguf\]'"):
        logits(file, "cpu", "float32")
