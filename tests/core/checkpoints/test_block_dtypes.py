from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inl.checkpoints.blocks.codebooks import FALLBACK_DTYPES
from inl.checkpoints.blocks.dtypes import (
    BLOCK_DTYPES,
    BLOCKS,
    PIECE,
    convert,
    dequantize,
    packed_bytes,
)
from inl.checkpoints.gguf import types
from inl.dtypes import HostArray, cast
from inl.errors import CheckpointError, MissingPackage

KINDS = {
    name: gguf.GGMLQuantizationType[name.upper()]
    for name in (*BLOCK_DTYPES, "nvfp4")
    if name not in ("mxfp8", "fp8_128")  # not in GGUF files
}


def same_bits(found, expected):
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def reference(blocks, name):
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks, KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_random_blocks_decode_bitwise_like_ggml(name):
    elements, size = BLOCKS[name]
    rng = np.random.default_rng(1)
    # Random bytes are random scales too: subnormal, huge, infinite, NaN, negative.
    blocks = rng.integers(0, 256, (20_000, size), dtype=np.uint8)
    packed = HostArray(blocks, name, (20_000, elements))
    assert same_bits(dequantize(packed), reference(blocks, name))


@pytest.mark.parametrize("name", KINDS)
@given(scale=st.integers(0, 0xFFFF), offset=st.integers(0, 0xFFFF), code=st.binary())
def test_any_scale_decodes_bitwise_like_ggml(name, scale, offset, code):
    elements, size = BLOCKS[name]
    scales = scale.to_bytes(2, "little") + offset.to_bytes(2, "little")
    # Scales are at the beginning or at the end of a block.
    for raw in (
        scales + code.ljust(size, b"\x9f")[: size - 4],
        code.ljust(size, b"\x9f")[: size - 4] + scales,
    ):
        block = np.frombuffer(raw.ljust(size, b"\x9f")[:size], np.uint8)[None]
        found = dequantize(HostArray(block, name, (1, elements)))
        assert same_bits(found, reference(block, name))


@pytest.mark.parametrize("name", KINDS)
def test_every_bit_of_a_block_decodes_like_ggml(name):
    elements, size = BLOCKS[name]
    blocks = np.full((8 * size, size), 0x3C, np.uint8)  # scales of about one
    flipped = np.unpackbits(blocks, axis=1)
    flipped[np.arange(8 * size), np.arange(8 * size)] ^= 1
    blocks = np.packbits(flipped, axis=1)
    found = dequantize(HostArray(blocks, name, (8 * size, elements)))
    assert same_bits(found, reference(blocks, name))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"])
def test_round_trip_error_is_within_half_a_step(name):
    values = np.random.default_rng(2).uniform(-1, 1, (8, 64)).astype(np.float32)
    packed = gguf.quantize(values, KINDS[name])
    found = dequantize(HostArray(packed, name, values.shape))
    step = 0.26 if name == "mxfp4" else 2 / 2 ** BLOCK_DTYPES[name].bits
    assert np.abs(found - values).max() <= step


@pytest.mark.parametrize("name", BLOCK_DTYPES)
def test_descriptors_give_the_number_of_values_per_group(name):
    """One group of one block, with any codes."""
    kind, rng = BLOCK_DTYPES[name], np.random.default_rng(4)
    elements, size = BLOCKS[name]
    blocks = rng.integers(0, 256, (400, size), dtype=np.uint8)
    if name == "mxfp4":
        blocks[:, 0] = 128
    blocks[:, :2] = blocks[:, -2:] = (0, 0x3C)
    found = dequantize(HostArray(blocks, name, (400, elements)))
    for group in found.reshape(-1, kind.group):
        assert len(np.unique(group)) <= 2**kind.bits


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_dtypes_are_widened(dtype):
    values = np.array([[1.5, -2.25], [0.0, 3.0]], np.float32)
    found = dequantize(cast(values, dtype))
    assert found.dtype == np.float32
    assert np.array_equal(found, values)


@pytest.mark.parametrize("stored", ["q4_k", "q8_0", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_conversion_in_pieces_equals_conversion_at_once(stored, dtype):
    rng, shape = np.random.default_rng(6), (3, 2 * PIECE // 3 // 256 * 256 + 256)
    if stored in BLOCKS:
        elements, size = BLOCKS[stored]
        packed = rng.integers(0, 255, (3, shape[1] // elements * size), dtype=np.uint8)
        array = HostArray(packed, stored, shape)
    else:
        array = cast(rng.standard_normal(shape), stored)
    with np.errstate(all="ignore"):
        expected = cast(dequantize(array), dtype)
    found = convert(array, dtype)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert array.dtype == dtype or not found.data.flags.writeable
    assert found.data.tobytes() == expected.data.tobytes()


@pytest.mark.parametrize("shape", [(), (0, 32), (1,), (2, 3, 4)])
def test_conversion_preserves_the_shape(shape):
    found = convert(HostArray(np.ones(shape, np.float16), "float16", shape), "float32")
    assert found.data.shape == found.shape == shape
    assert (found.data == 1).all()


def test_a_conversion_error_names_the_tensor():
    packed = HostArray(np.zeros((1, 292), np.uint8), "q8_k", (1, 256))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.x': dtype: found q8_k"):
        convert(packed, "float32", "blk.0.x")


def test_every_type_of_gguf_py_has_a_name_and_a_size():
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        name = types.KINDS[kind.value]
        assert BLOCKS.get(name, (1, sizes[1])) == tuple(sizes), name


@pytest.mark.parametrize("kind", ["q8_k", "q8_1", "q1_0"])
def test_a_dtype_without_a_decoder_is_refused(kind):
    elements, size = BLOCKS[kind]
    packed = HostArray(np.zeros((1, size), np.uint8), kind, (1, elements))
    with pytest.raises(CheckpointError) as caught:
        dequantize(packed, "blk.0.ffn_up.weight")
    parts = ("blk.0.ffn_up.weight", f"found {kind}", "q8_0", "q4_k", "bfloat16")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", FALLBACK_DTYPES)
def test_codebook_dtypes_use_the_gguf_package(kind, monkeypatch):
    elements, size = BLOCKS[kind]
    raw = np.random.default_rng(4).integers(0, 256, (3, 5 * size)).astype(np.uint8)
    array = HostArray(raw, kind, (3, 5 * elements))
    found = dequantize(array)
    assert found.shape == array.shape
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    assert same_bits(found, want)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPackage, match=r"'x': dtype .*\[gguf\]'"):
        dequantize(array, "x")


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType)
def test_block_sizes_match_ggml(kind):
    name = kind.name.lower()
    if name in BLOCKS:
        assert BLOCKS[name] == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((3, 64), "q4_1", 3 * 2 * 20),
        ((2, 256), "q4_k", 288),
        ((5,), "bfloat16", 10),
        ((0, 32), "q8_0", 0),
    ],
)
def test_packed_bytes(shape, dtype, size):
    assert packed_bytes(shape, dtype) == size


@pytest.mark.parametrize(
    ("shape", "dtype", "part"),
    [((4, 33), "q8_0", "33"), ((), "q4_0", "[]"), ((4,), "q9_9", "'q9_9'")],
)
def test_packed_bytes_refuses(shape, dtype, part):
    with pytest.raises(CheckpointError, match="accepted") as caught:
        packed_bytes(shape, dtype)
    assert part in str(caught.value)


@pytest.mark.full
def test_the_default_model_decodes_bitwise_like_ggml(default_checkpoint):
    decoded = {
        name: dequantize(default_checkpoint.tensor(name), name)
        for name in default_checkpoint.names()
    }
    assert len(decoded) == 272
    raw = {one.name: one for one in gguf.GGUFReader(default_checkpoint.path).tensors}
    for stored, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
        "blk.7.attn_v.weight": "model.layers.7.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        expected = gguf.dequantize(raw[stored].data, raw[stored].tensor_type)
        assert same_bits(decoded[name], expected)


def test_exponents_are_powers_of_two():
    codes = np.arange(256, dtype=np.uint8)
    found = dequantize(HostArray(codes, "float8_e8m0", (256,)))
    assert found[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert np.isnan(found[255])
