"""Bodies of HTML forms with files, ``multipart/form-data`` of RFC 7578."""

from __future__ import annotations

import re
from typing import NamedTuple

from inl.serve.api_error import ApiError

MAX_PARTS = 64
"""Parts of a body; an upload has up to four."""

MAX_HEADERS = 4096
"""Bytes of the headers of a part."""

BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


class Part(NamedTuple):
    """One field of a form. filename: ``None`` if it is no file."""

    filename: str | None
    data: bytes


def parse_form(content_type: str, body: bytes) -> dict[str, Part]:
    """Return the parts of a body by name; raises :class:`ApiError` 400.

    Of parts with one name, the last counts.
    """
    found = BOUNDARY.search(content_type.encode("latin-1", "replace"))
    if found is None or not content_type.lower().startswith("multipart/form-data"):
        raise _malformed(f"found content type {content_type!r:.80}")
    mark = b"\r\n--" + (found[1] or found[2])
    first, *rest = (b"\r\n" + body).split(mark, MAX_PARTS + 1)
    if first.strip() or not rest or len(rest) > MAX_PARTS:
        raise _malformed(f"found {len(rest)} parts")
    if not rest[-1].startswith(b"--"):
        raise _malformed("found no end of the last part")
    return dict(map(_part, rest[:-1]))


def _part(data: bytes) -> tuple[str, Part]:
    head, separator, content = data.partition(b"\r\n\r\n")
    if not separator or len(head) > MAX_HEADERS or not data.startswith(b"\r\n"):
        raise _malformed("found a part without headers")
    for line in head.decode("utf-8", "replace").split("\r\n"):
        if line.lower().startswith("content-disposition:"):
            values = {
                key.lower(): _plain(value) for key, value in PARAMETER.findall(line)
            }
            if "name" in values:
                return values["name"], Part(values.get("filename"), content)
    raise _malformed("found a part without a name")


def _plain(quoted: str) -> str:
    """Undo the escapes of a quoted value: of clients, and of browsers."""
    text = re.sub(r'\\(["\\])', r"\1", quoted)
    return re.sub(r"%(22|0D|0A)", lambda code: chr(int(code[1], 16)), text)


def _malformed(found: str) -> ApiError:
    return ApiError(
        400, f"body: {found}; accepts multipart/form-data with up to {MAX_PARTS} parts",
        code="invalid_value",
    )  # fmt: skip
