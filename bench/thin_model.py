"""A GGUF file whose layers are copies, small enough to carry to another machine.

    python bench/thin_model.py pack MODEL.gguf thin.gz
    python bench/thin_model.py unpack thin.gz MODEL.gguf

Keeps metadata, tokenizer, embedding and the first layer; the others repeat it. Speed
and memory are those of the whole model, texts are not.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from inl.checkpoints.files.tensor_file import Entry
from inl.checkpoints.gguf.file import GgufFile

LAYER = re.compile(r"blk\.\d+\.(.*)")


def repeated(path: Path) -> Iterator[tuple[Entry, Entry]]:
    """Yield the entries of equal form in the first layer, and in each later one."""
    firsts: dict[tuple[str, str], Entry] = {}
    for name, entry in GgufFile(path).tensors.items():
        if layer := LAYER.fullmatch(name):
            first = firsts.setdefault((layer[1], entry.dtype), entry)
            if first is not entry:
                yield first, entry


def pack(model: Path, thin: Path) -> None:
    """Write a compressed copy of a model with zeros in place of later layers."""
    data = bytearray(model.read_bytes())
    for _, entry in repeated(model):
        data[entry.start : entry.stop] = bytes(entry.stop - entry.start)
    thin.write_bytes(gzip.compress(data, 6))


def unpack(thin: Path, model: Path) -> None:
    """Write the model of a packed file."""
    data = bytearray(gzip.decompress(thin.read_bytes()))
    model.write_bytes(data)
    for first, entry in repeated(model):
        data[entry.start : entry.stop] = data[first.start : first.stop]
    model.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    {"pack": pack, "unpack": unpack}[given.action](given.source, given.target)


if __name__ == "__main__":
    main()
