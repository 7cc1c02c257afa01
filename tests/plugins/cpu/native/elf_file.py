"""Reads what hardening leaves in a 64-bit little-endian ELF file."""

from __future__ import annotations

import struct
from typing import NamedTuple

X86_64, AARCH64 = 62, 183
LOAD, DYNAMIC, NOTE = 1, 2, 4
GNU_PROPERTY, GNU_STACK, GNU_RELRO = 0x6474E553, 0x6474E551, 0x6474E552
EXECUTE, WRITE = 1, 2
STRTAB, SYMTAB, STRSZ, TEXTREL, FLAGS, GNU_FLAGS = 5, 6, 10, 22, 30, 0x6FFFFFFB
BIND_NOW, NOW = 8, 1
X86_FEATURES, SHSTK = 0xC0000002, 2


class Segment(NamedTuple):
    """A program header."""

    kind: int
    flags: int
    offset: int
    address: int
    size: int


class Symbol(NamedTuple):
    """An entry of the dynamic symbol table."""

    name: str
    kind: int
    section: int
    address: int


class ElfFile:
    """Segments, dynamic entries, symbols and notes of a shared library."""

    def __init__(self, path):
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01"
        (self.machine,) = struct.unpack_from("<H", self.data, 18)
        (start,) = struct.unpack_from("<Q", self.data, 32)
        size, count = struct.unpack_from("<2H", self.data, 54)
        self.segments = [self._segment(start + n * size) for n in range(count)]
        self.dynamic = dict(self._dynamic())

    def _segment(self, at):
        kind, flags, offset, address, _, size = struct.unpack_from(
            "<2I4Q", self.data, at
        )
        return Segment(kind, flags, offset, address, size)

    def of_kind(self, kind):
        return [segment for segment in self.segments if segment.kind == kind]

    def _dynamic(self):
        (segment,) = self.of_kind(DYNAMIC)
        for at in range(segment.offset, segment.offset + segment.size, 16):
            tag, value = struct.unpack_from("<2Q", self.data, at)
            if tag == 0:
                return
            yield tag, value

    def offset(self, address):
        """Place of an address in the file."""
        for segment in self.of_kind(LOAD):
            if segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        raise AssertionError(f"{address:#x} is not in the file")

    def symbols(self):
        """The dynamic symbols; linkers place their names behind them."""
        names = self.offset(self.dynamic[STRTAB])
        for at in range(self.offset(self.dynamic[SYMTAB]), names, 24):
            name, info, _, section, address = struct.unpack_from(
                "<I2BHQ", self.data, at
            )
            if name < self.dynamic[STRSZ]:
                end = self.data.index(b"\0", names + name)
                text = self.data[names + name : end].decode()
                yield Symbol(text, info & 15, section, address)

    def imports(self):
        return {symbol.name for symbol in self.symbols() if symbol.section == 0}

    def x86_features(self):
        """Bits of the note of CET; 0 without it."""
        for segment in self.of_kind(GNU_PROPERTY):
            at = segment.offset + 16  # after the sizes, the kind and the name "GNU"
            while at < segment.offset + segment.size:
                kind, size, value = struct.unpack_from("<3I", self.data, at)
                if kind == X86_FEATURES:
                    return value
                at += 8 + -(-size // 8) * 8
        return 0
