"""Invalid files: each message names the value, its location and what is accepted."""

from __future__ import annotations

import json
import struct
import tracemalloc

import pytest
from safetensors.numpy import save_file

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import open_checkpoint
from inl.errors import CheckpointError


class GgufBytes:
    """Writes GGUF field by field, so that every field can be wrong."""

    U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = range(11)

    @staticmethod
    def string(text):
        raw = text if isinstance(text, bytes) else text.encode()
        return struct.pack("<Q", len(raw)) + raw

    @classmethod
    def pair(cls, key, kind, payload):
        return cls.string(key) + struct.pack("<I", kind) + payload

    @classmethod
    def tensor(cls, name, sizes, kind=0, offset=0):
        head = cls.string(name) + struct.pack("<I", len(sizes))
        return head + struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)

    @staticmethod
    def file(
        pairs=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, counts=None, pad=32
    ):
        tensor_count, pair_count = counts or (len(tensors), len(pairs))
        head = magic + struct.pack("<IQQ", version, tensor_count, pair_count)
        head += b"".join(pairs) + b"".join(tensors)
        return head + b"\0" * (-len(head) % pad) + data


def safetensors_file(header, data=b"", *, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def refusal(path):
    """Return the message for a file, which must be refused in less than 4 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4_000_000
    assert "accepted" in str(caught.value)
    assert len(str(caught.value)) < 1200
    return str(caught.value)


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def gguf_cases(make):
    arch = make.pair("general.architecture", make.STRING, make.string("llama"))
    array = make.ARRAY
    nested = u32(array) + u64(1)
    one = [make.tensor("t", (4,))]

    def typed(kind, payload):
        return make.file([arch, make.pair("key", kind, payload)])

    def tensor(*args, data=bytes(64), **options):
        return make.file([arch], [make.tensor(*args, **options)], data)

    def field(key, kind, payload):
        return make.file([arch, make.pair(key, kind, payload)])

    def alignment(value):
        return field("general.alignment", make.U32, u32(value))

    return {
        "empty": (b"", ["magic", "b''", "GGUF"]),
        "magic": (make.file(magic=b"GGML"), ["magic", "b'GGML'", "b'GGUF'"]),
        "version 1": (make.file(version=1), ["version", "found 1", "2 and 3"]),
        "version 9": (make.file(version=9), ["version", "found 9", "2 and 3"]),
        "big endian": (make.file(version=3 << 24), ["version", "big endian", "little"]),
        "tensor count": (
            make.file(counts=(1 << 60, 0)),
            ["tensor count", str(1 << 60), "at most 0"],
        ),
        "metadata count": (
            make.file([arch], counts=(0, 1 << 60)),
            ["metadata count", str(1 << 60)],
        ),
        "one pair too many": (
            make.file([arch], counts=(0, 2), pad=64),
            ["key of metadata 1", "1 to 65535 bytes"],
        ),
        "key length": (
            make.file([u64(1 << 62) + b"key" + u32(4) * 9]),
            ["key of metadata 0", str(1 << 62)],
        ),
        "key no utf-8": (
            make.file([make.pair(b"\xff\xfe", make.U32, u32(1))]),
            ["key of metadata 0", "0xff", "UTF-8"],
        ),
        "key twice": (make.file([arch, arch]), ["'general.architecture' twice"]),
        "value type": (typed(13, u32(1)), ["type of 'key'", "found 13", "0 to 12"]),
        "bool": (typed(make.BOOL, b"\x02"), ["'key'", "found 2", "0 or 1"]),
        "string length": (
            typed(make.STRING, u64(1 << 63) + b"abc"),
            ["'key'", str(1 << 63), "at most"],
        ),
        "array type": (
            typed(array, u32(99) + u64(0)),
            ["element type of 'key'", "found 99"],
        ),
        "array length": (
            typed(array, u32(make.U8) + u64(1 << 60)),
            ["length of 'key'", str(1 << 60)],
        ),
        "strings length": (
            typed(array, u32(make.STRING) + u64(1 << 60) + bytes(64)),
            ["length of 'key'", str(1 << 60)],
        ),
        "arrays length": (
            typed(array, u32(array) + u64(1 << 59) + bytes(64)),
            ["length of 'key'", str(1 << 59)],
        ),
        "nesting": (
            typed(array, nested * 200 + u32(make.U8) + u64(0)),
            ["'key'", "nested deeper than 4"],
        ),
        "alignment 0": (alignment(0), ["general.alignment", "found 0", "power of two"]),
        "alignment 24": (alignment(24), ["general.alignment", "found 24"]),
        "alignment type": (
            field("general.alignment", make.STRING, make.string("32")),
            ["general.alignment", "'32'"],
        ),
        "tensor name": (
            make.file([arch], [u64(1 << 40) + bytes(32)]),
            ["name of tensor 0", str(1 << 40)],
        ),
        "tensor name empty": (tensor("", (4,)), ["name of tensor 0", "''"]),
        "tensor twice": (make.file([arch], one * 2, bytes(64)), ["'t' twice"]),
        "rank 0": (tensor("t", ()), ["tensor 't': rank", "found 0", "1 to 4"]),
        "rank 5": (tensor("t", (1,) * 5), ["tensor 't': rank", "found 5"]),
        "rank huge": (
            make.file([arch], [make.string("t") + u32(2**32 - 1) + bytes(64)]),
            ["tensor 't': rank", str(2**32 - 1)],
        ),
        "shape": (
            tensor("t", (1 << 62, 8)),
            ["tensor 't': shape", str(1 << 62), "2**48"],
        ),
        "shape wraps to nothing": (tensor("t", (1 << 32, 1 << 32)), ["'t': shape"]),
        "shape too large": (tensor("t", (17,)), ["'t'", "68 bytes", "up to 64"]),
        "blocks": (tensor("t", (33, 2), kind=3), ["'t'", "[2, 33]", "multiples of 32"]),
        "kind": (
            tensor("t", (4,), kind=77),
            ["tensor 't': kind", "found 77", "8 (q8_0)"],
        ),
        "offset unaligned": (
            tensor("t", (4,), offset=8),
            ["'t': offset", "found 8", "multiples of 32"],
        ),
        "offset outside": (
            tensor("t", (4,), offset=64),
            ["'t'", "16 bytes at offset 64", "64"],
        ),
        "offset huge": (
            tensor("t", (4,), offset=(1 << 64) - 32),
            ["'t'", str((1 << 64) - 32)],
        ),
        "overlap": (
            make.file([arch], [*one, make.tensor("u", (4,))], bytes(64)),
            ["'u'", "inside 't'", "do not overlap"],
        ),
        "no architecture": (make.file([]), ["general.architecture", "None"]),
        "architecture type": (
            make.file([make.pair("general.architecture", make.U32, u32(5))]),
            ["general.architecture", "found 5"],
        ),
        "split": (field("split.count", make.U16, b"\3\0"), ["split.count", "found 3"]),
        "missing field": (
            make.file([arch]),
            ["llama.attention.head_count", "found nothing", "an integer"],
        ),
        "field type": (
            field("llama.attention.head_count", make.STRING, make.string("9")),
            ["llama.attention.head_count", "'9'"],
        ),
        "field zero": (
            field("llama.attention.head_count", make.U32, u32(0)),
            ["llama.attention.head_count", "found 0", "from 1"],
        ),
        "tokens type": (
            field("tokenizer.ggml.tokens", array, u32(make.U8) + u64(1) + b"x"),
            ["tokenizer.ggml.tokens", "strings"],
        ),
        "end token": (
            field("tokenizer.ggml.eos_token_id", make.U32, u32(7)),
            ["tokenizer.ggml.eos_token_id", "found 7", "below 0"],
        ),
    }


def safetensors_cases(make):
    def one(dtype="F32", shape=(2,), offsets=(0, 8), data=bytes(8), **more):
        fields = {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}
        return make({"t": fields}, data)

    def two(first, second, size):
        fields = {"dtype": "U8"}
        return make(
            {
                "a": fields | {"shape": [first[1] - first[0]], "data_offsets": first},
                "b": fields
                | {"shape": [second[1] - second[0]], "data_offsets": second},
            },
            bytes(size),
        )

    good = one()
    twice = b'{"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    twice += twice[1:-1] + b"}"
    return {
        "empty": (b"", ["header length", "0 bytes"]),
        "seven bytes": (bytes(7), ["header length", "7 bytes"]),
        "header too long": (
            make({}, length=1 << 62),
            ["header length", str(1 << 62), "accepted: 2 to"],
        ),
        "header a byte too long": (make({}, length=3), ["header length", "found 3"]),
        "header cut": (good[:-20], ["header length"]),
        "not json": (make(b"{x}"), ["header", "line 1, column 2"]),
        "a list": (make([]), ["header", "JSON list"]),
        "no utf-8": (make(b'{"\xff": 1}'), ["header", "0xff"]),
        "deep": (make(b'{"a":' * 50_000), ["header", "nested 50000 levels"]),
        "tensor twice": (make(twice), ["'t': found twice"]),
        "metadata": (make({"__metadata__": {"a": 1}}), ["__metadata__", "{'a': 1}"]),
        "fields": (make({"t": {"dtype": "F32"}}), ["'t'", "data_offsets"]),
        "another field": (one(extra=1), ["'t'", "extra"]),
        "no object": (make({"t": 5}), ["'t'", "found 5"]),
        "dtype": (one("F8_E9"), ["'t': dtype", "'F8_E9'", "BF16"]),
        "dtype type": (one(["F32"]), ["'t': dtype", "['F32']"]),
        "shape type": (one(shape="2"), ["'t': shape", "'2'"]),
        "shape of text": (one(shape=["2"]), ["'t': shape", "['2']"]),
        "shape negative": (one(shape=[-2]), ["'t': shape", "[-2]"]),
        "shape of truth": (one(shape=[True, 2]), ["'t': shape", "True"]),
        "shape of floats": (one(shape=[2.0]), ["'t': shape", "2.0"]),
        "shape wraps": (one(shape=[1 << 62, 4, 0]), ["'t': shape", "2**48"]),
        "shape long": (one(shape=[1] * 1000), ["'t': shape", "at most 8"]),
        "shape too large": (one(shape=[3]), ["'t'", "8 bytes", "[3]", "12"]),
        "offsets": (one(offsets=[8, 0]), ["'t': data_offsets", "[8, 0]"]),
        "offsets negative": (one(offsets=[-8, 0]), ["'t': data_offsets", "-8"]),
        "offsets of three": (
            one(offsets=[0, 4, 8]),
            ["'t': data_offsets", "[0, 4, 8]"],
        ),
        "offsets outside": (
            one(shape=[4], offsets=[0, 16]),
            ["'t': data_offsets", "[0, 16]", "up to 8"],
        ),
        "cut": (good[:-1], ["'t': data_offsets", "up to 7"]),
        "overlap": (two([0, 8], [4, 12], 12), ["'b'", "byte", "inside 'a'"]),
        "hole": (two([0, 4], [8, 12], 12), ["'b'", "no hole"]),
        "hole in front": (two([4, 8], [8, 12], 12), ["'a'", "no hole"]),
        "trailing": (good + b"x", ["last tensor ends", "end of the file"]),
    }


GGUF = gguf_cases(GgufBytes)
SAFETENSORS = safetensors_cases(safetensors_file)


@pytest.mark.parametrize("name", GGUF)
def test_an_invalid_gguf_is_refused(name, tmp_path):
    raw, parts = GGUF[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    message = refusal(path)
    assert [part for part in ["bad.gguf", *parts] if part not in message] == [], message


@pytest.mark.parametrize("name", SAFETENSORS)
def test_an_invalid_safetensors_file_is_refused(name, tmp_path):
    raw, parts = SAFETENSORS[name]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(raw)
    message = refusal(tmp_path)
    parts = ["model.safetensors", *parts]
    assert [part for part in parts if part not in message] == [], message


def test_a_gguf_cut_anywhere_is_refused(tiny_gguf):
    whole = tiny_gguf.read_bytes()
    for size in [*range(400), *range(400, len(whole) - 64, 211)]:
        tiny_gguf.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="accepted"):
            open_checkpoint(tiny_gguf)


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path, tensors):
    path = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, path)
    whole = path.read_bytes()
    for size in [*range(400), *range(400, len(whole), 499)]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="accepted"):
            open_checkpoint(tmp_path)


def test_heads_that_do_not_divide_the_rows_are_refused(tiny_gguf):
    raw = tiny_gguf.read_bytes()
    key = b"llama.attention.head_count" + u32(4)
    assert raw.count(key) == 1
    tiny_gguf.write_bytes(raw.replace(key + u32(4), key + u32(7)))
    checkpoint = open_checkpoint(tiny_gguf)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight'.*7 heads"):
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")


def test_an_unsupported_dtype_is_refused_on_decoding(tmp_path):
    make = GgufBytes
    pairs = [make.pair("general.architecture", make.STRING, make.string("x"))]
    path = tmp_path / "k.gguf"
    path.write_bytes(make.file(pairs, [make.tensor("t", (256,), kind=15)], bytes(292)))
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec("t") == ("q8_k", (256,))
    with pytest.raises(
        CheckpointError, match=r"'t': dtype: found q8_k; accepted: .*q4_k"
    ):
        dequantize(checkpoint.tensor("t"), "t")
