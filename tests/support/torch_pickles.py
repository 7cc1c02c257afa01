"""Pickles as ``torch.save`` writes them, made byte by byte."""

from __future__ import annotations

import struct

import numpy as np


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value):
    return b"J" + struct.pack("<i", value)


def several(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def call(module, attribute, arguments=b""):
    return name(module, attribute) + b"(" + arguments + b"tR"


ORDERED = call("collections", "OrderedDict")


def storage(key, size, kind="FloatStorage", module="torch"):
    parts = text("storage") + name(module, kind) + text(key) + text("cpu")
    return b"(" + parts + number(size) + b"tQ"


def tensor(shape, strides, *, key="0", size=None, offset=0, kind="FloatStorage"):
    size = int(np.prod(shape)) if size is None else size
    parts = storage(key, size, kind) + number(offset) + several(shape)
    return call(
        "torch._utils",
        "_rebuild_tensor_v2",
        parts + several(strides) + b"\x89" + ORDERED,
    )


def mapping(items, begin=b"}"):
    inside = b"".join(text(key) + value for key, value in items.items())
    return begin + b"(" + inside + b"u"


def program(items):
    return b"\x80\x02" + mapping(items) + b"."
