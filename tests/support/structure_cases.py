"""Generators of model files whose structure is valid, wrong, or extreme in places.

Each function makes a file from a ``random.Random``; most values are as in real files.
"""

from __future__ import annotations

import json
import struct

from torch_pickles import ORDERED, call, mapping, name, number, several, tensor, text

COUNTS = [0, 1, 2, 3, 7, 64, 255, 256, 4096, 65536, 10**6, 2**31, 2**32 - 1, 2**60]
SIZES = [0, 1, 2, 4, 8, 16, 64]
ODD = [
    *(None, True, False, -1, 0, 1, 2, 2.5, 1e308, 1e-300, float("inf"), float("nan")),
    *(1 << 31, 1 << 70, "", "x", "a" * 3000, [], {}, [[]], {"": None}, [0] * 300),
]
NESTED = "nested here"
WORDS = ["a", "b", "ab", "é", "<s>", "</s>", "日", " ", "\n", "abc" * 40, "\u2581a"]


def odd(rng, value, chance=0.04):
    """The value, or now and then one of another type or size."""
    return rng.choice(ODD) if rng.random() < chance else value


def count(rng, value, chance=0.03):
    return rng.choice(COUNTS) if rng.random() < chance else value


def with_nesting(rng, text):
    """A JSON text in which NESTED is replaced by so many lists or objects."""
    depth, (begin, end) = rng.choice([1, 50, 3000, 30_000]), rng.choice(["[]", "{}"])
    begin += '"a":' if begin == "{" else ""
    return text.replace(f'"{NESTED}"', f"{begin * depth}1{end * depth}").encode()


# Pickles.


def pickled(rng, depth=0):
    """The program of a value; deep, wide or shared now and then."""
    kind = rng.randrange(10 if depth < 4 else 5)
    if kind < 5:
        simple = [b"N", b"\x88", b"K\x07", text(rng.choice(WORDS)), number(-3)]
        return simple[kind]
    parts = b"".join(pickled(rng, depth + 1) for _ in range(rng.choice(SIZES[:5])))
    if kind == 5:
        return b"](" + parts + b"e"
    if kind == 6:
        return b"(" + parts + b"t"
    if kind == 7:
        return b"}(" + text("k") + pickled(rng, depth + 1) + b"u"
    if kind == 8:
        wrap = rng.choice([b"\x85", b"q\x01h\x01\x86", b"]h\x01a"])
        return b")q\x01" + wrap * rng.choice([1, 2, 40, 3000])
    return rng.choice([b"}", b"]", b")", b"N"]) * rng.choice([1, 50, 20_000]) + b"N"


def pickle_tensor(rng):
    shape = [count(rng, rng.choice(SIZES[:4])) for _ in range(rng.choice([0, 1, 2, 2]))]
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step if rng.random() < 0.97 else rng.choice(COUNTS))
        step *= size
    small = [min(size, 2**31 - 1) for size in shape]
    return tensor(
        tuple(small),
        tuple(min(stride, 2**31 - 1) for stride in reversed(strides)),
        key=rng.choice("0001x"),
        size=min(count(rng, 64), 2**31 - 1),
        offset=min(count(rng, 0), 2**31 - 1),
        kind=rng.choice(["FloatStorage", "HalfStorage", "BFloat16Storage", "X"][:3]),
    )


def pickle_program(rng):
    items = {
        f"layer.{at}.weight": pickle_tensor(rng) for at in range(rng.choice(SIZES))
    }
    if rng.random() < 0.2:
        items[rng.choice(["x", "model", "epoch"])] = pickled(rng)
    inner = mapping(items, rng.choice([b"}", ORDERED]))
    if rng.random() < 0.3:
        inner = mapping({rng.choice(["model", "state_dict", "other"]): inner})
    if rng.random() < 0.05:
        inner += rng.choice(
            [call("os", "system", text("x")), name("a", "b"), b"R", b"t"]
        )
    if rng.random() < 0.05:
        inner += (
            pickled(rng) + several([1, 2]) + rng.choice([b"\x93", b"Q", b"b", b"0"])
        )
    return b"\x80\x02" + inner + b"."


# GGUF.


def gguf_string(rng, value):
    raw = value.encode("utf-8", "surrogatepass")
    if rng.random() < 0.005:
        raw = raw[:-1]
    return struct.pack("<Q", count(rng, len(raw), 0.002)) + raw


def gguf_value(rng, kind, value):
    """The bytes of a value; ``value`` is a list for an array."""
    if kind == 8:
        return gguf_string(rng, value)
    form = {0: "B", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 12: "d"}
    if kind != 9:
        return struct.pack(f"<{form[kind]}", value)
    inner, items = value
    head = struct.pack("<IQ", inner, count(rng, len(items), 0.005))
    return head + b"".join(gguf_value(rng, inner, item) for item in items)


def gguf_metadata(rng, fields):
    """Pairs of a tiny Llama, with changes of type, order and number."""
    pairs = list(fields)
    if rng.random() < 0.1:
        depth = rng.choice([1, 2, 4, 5, 9])
        inner = (0, [1] * rng.choice([1, 300, 20_000]))
        for _ in range(depth - 1):
            inner = (9, [inner] * rng.choice([1, 2]))
        pairs.append(("extra.array", 9, inner))
    if rng.random() < 0.05:
        pairs += [(f"extra.{at}", 0, 1) for at in range(rng.choice([1, 500]))]
    if rng.random() < 0.1:
        at = rng.randrange(len(pairs))
        pairs[at] = rng.choice([
            (pairs[at][0], 4, rng.choice(COUNTS) % 2**32),
            (pairs[at][0], 6, rng.choice([0.0, -1.0, float("inf"), float("nan")])),
            (pairs[at][0], 8, rng.choice(WORDS)),
            (pairs[at][0], 9, (8, WORDS)),
            pairs[rng.randrange(len(pairs))],
        ])  # fmt: skip
    if rng.random() < 0.05:
        del pairs[rng.randrange(len(pairs))]
    return pairs


def gguf_file(rng, fields, tensors):
    """A GGUF of metadata (key, type, value) and tensors (name, shape, bytes)."""
    pairs = gguf_metadata(rng, fields)
    head = b"GGUF" + struct.pack("<I", count(rng, 3, 0.005) % 2**32)
    head += struct.pack(
        "<QQ", count(rng, len(tensors), 0.01), count(rng, len(pairs), 0.01)
    )
    for key, kind, value in pairs:
        head += gguf_string(rng, key) + struct.pack(
            "<I", count(rng, kind, 0.002) % 2**32
        )
        head += gguf_value(rng, kind, value)
    data = b""
    for label, shape, raw in tensors:
        sizes = [count(rng, size, 0.001) for size in reversed(shape)]
        head += gguf_string(rng, label) + struct.pack("<I", len(sizes))
        head += struct.pack(f"<{len(sizes)}Q", *sizes)
        kind, offset = count(rng, 0, 0.002) % 2**32, count(rng, len(data), 0.002)
        head += struct.pack("<IQ", kind, offset)
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


# tokenizer.json.


def rule(rng, kinds, depth=0):
    """A normalizer, pre-tokenizer or decoder."""
    kind, key = rng.choice(kinds), {"n": "normalizers", "p": "pretokenizers"}
    if kind == "Sequence" and depth < 5:
        of = key.get(kinds[0][0].lower() if kinds[0] != "Replace" else "", "decoders")
        parts = [rule(rng, kinds, depth + 1) for _ in range(rng.choice([0, 1, 2, 6]))]
        return {"type": "Sequence", of: parts}
    pattern = rng.choice([{"String": rng.choice(WORDS)}, {"Regex": rng.choice(
        ["a+", "", " {2,}", "(a|b)*", "[^a]", "(", "\\s+(?!\\S)|\\s+"])}])  # fmt: skip
    return odd(rng, {
        "type": kind, "pattern": pattern, "content": rng.choice(["", "b", "b" * 200]),
        "prepend": rng.choice(WORDS), "behavior": rng.choice(["Isolated", "Removed"]),
        "invert": False, "add_prefix_space": rng.random() < 0.5, "use_regex": True,
        "trim_offsets": True, "replacement": "\u2581", "prepend_scheme": "always",
        "split": True, "start": count(rng, 1), "stop": count(rng, 0),
        "strip_left": True, "strip_right": True, "individual_digits": True,
    }, 0.02)  # fmt: skip


NORMALIZERS = ["NFC", "NFKC", "Replace", "Prepend", "Lowercase", "Strip", "Sequence"]
PRE_TOKENIZERS = [
    "ptByteLevel",
    "Split",
    "Digits",
    "Whitespace",
    "Metaspace",
    "Sequence",
]
DECODERS = ["Replace", "ByteLevel", "ByteFallback", "Fuse", "Strip", "Sequence"]


def tokenizer_model(rng):
    words = [*WORDS, *(f"w{at}" for at in range(rng.choice([0, 5, 300])))]
    ids = {word: count(rng, at, 0.003) for at, word in enumerate(words)}
    kind = rng.choice(["BPE", "BPE", "BPE", "Unigram", "WordLevel"])
    if kind == "Unigram":
        if rng.random() < 0.05:
            words += [letter * rng.choice([100, 5000]) for letter in "xyz"]
        vocabulary = [[word, odd(rng, -1.0, 0.003)] for word in words]
        return {"type": kind, "unk_id": count(rng, 0), "vocab": vocabulary}
    merges = [["a", "b"]] if rng.random() < 0.9 else [["a", "zz"], ["a"]]
    model = {"type": kind, "vocab": ids, "unk_token": rng.choice(["a", "a", "nothing"])}
    return model | ({"merges": merges} if kind == "BPE" else {})


def tokenizer_json(rng):
    added = [
        {"id": count(rng, at, 0.01), "content": odd(rng, word, 0.01), "lstrip": False,
         "rstrip": False, "normalized": False, "single_word": False, "special": True}
        for at, word in ((4, "<s>"), (5, "</s>"))
    ]  # fmt: skip
    if rng.random() < 0.05:
        added *= rng.choice([3, 100])
    frame = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
             "strategy": {"Fixed": rng.choice(COUNTS)}}  # fmt: skip
    cut = {"max_length": rng.choice(COUNTS), "strategy": "LongestFirst", "stride": 0,
           "direction": "Right"}  # fmt: skip

    def some(value, chance=0.3):
        return value() if rng.random() < chance else None

    piece = {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing", "single": [piece] * rng.choice([1, 2, 500]),
        "pair": [piece], "special_tokens": {},
    }  # fmt: skip
    fields = {
        "version": "1.0",
        "truncation": some(lambda: cut), "padding": some(lambda: frame),
        "added_tokens": added, "normalizer": some(lambda: rule(rng, NORMALIZERS)),
        "pre_tokenizer": some(lambda: rule(rng, PRE_TOKENIZERS)),
        "post_processor": some(lambda: processor, 0.1),
        "decoder": some(lambda: rule(rng, DECODERS)), "model": tokenizer_model(rng),
    }  # fmt: skip
    if rng.random() < 0.05:
        fields[rng.choice(list(fields))] = NESTED
    text = json.dumps(fields).replace("ptByteLevel", "ByteLevel")
    return with_nesting(rng, text)
