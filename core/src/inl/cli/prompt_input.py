"""Texts that a command reads: a prompt from standard input or a file, a JSON schema."""

from __future__ import annotations

import codecs
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from inl.bounded_json import parse_json
from inl.errors import InvalidJson, RequestError

MAX_BYTES = 32 << 20
"""Most bytes of a text; the same as the server's default for a request body."""
ESCAPED = re.compile("[\udc80-\udcff]")
"""Bytes of arguments and paths that the locale cannot decode."""

ACCEPTED = "accepted: PROMPT, @FILE, or - for standard input"


def read_prompt(prompt: str | None) -> str:
    """Return the text of a PROMPT argument, without the end of its last line.

    prompt: the text, ``@FILE``, ``@@...`` for a text that begins with ``@``, or ``-``
    for standard input, which ``None`` means too. Raises
    :class:`~inl.errors.RequestError` for a text that cannot be read, is empty, longer
    than :data:`MAX_BYTES` or not UTF-8.
    """
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise RequestError(f"PROMPT: missing; {ACCEPTED}")
        text = _text(_read(sys.stdin.buffer, "standard input"), "standard input")
        if not text:
            raise RequestError(f"PROMPT: standard input is empty; {ACCEPTED}")
        return text
    if prompt.startswith("@@"):
        return text_of(prompt[1:])
    if not prompt.startswith("@"):
        return text_of(prompt)
    name = prompt[1:]
    try:
        with Path(name).expanduser().open("rb") as file:
            return _text(_read(file, name), name)
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(
            f"{prompt:.200}: cannot be read: {reason}; {ACCEPTED}; "
            "@@ begins a text with @"
        ) from error


def text_of(word: str) -> str:
    """Return the text of an argument, also where the locale has only ASCII.

    Bytes that are no UTF-8 stay what Python makes of them, which no output has.
    """
    if not ESCAPED.search(word):
        return word
    with suppress(UnicodeError):
        return os.fsencode(word).decode()
    return word


def decode(data: bytes, where: str) -> str:
    """Decode UTF-8, with or without a byte order mark.

    Raises :class:`~inl.errors.RequestError`, which begins with ``where``.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        found = "UTF-16" if utf_16 else f"the byte 0x{data[error.start]:02x}"
        raise RequestError(
            f"{where}: found {found} at byte {0 if utf_16 else error.start}; "
            "accepted: UTF-8"
        ) from error


def read_schema(value: str | None) -> dict[str, Any] | None:
    """Return the ``structured`` option for ``--json-schema``, a file or JSON text.

    Raises :class:`~inl.errors.RequestError`.
    """
    if value is None:
        return None
    where, text = "--json-schema", value
    if not value.lstrip().startswith(("{", "[")):
        where = f"--json-schema: {value:.200}"
        try:
            with Path(value).expanduser().open("rb") as file:
                text = decode(_read(file, where), where)
        except OSError as error:
            raise RequestError(
                f"{where}: cannot be read: {error.strerror or error}; accepted: a "
                "file, or a schema as JSON text"
            ) from error
    try:
        schema = parse_json(text, where, max_bytes=MAX_BYTES)
    except InvalidJson as error:
        raise RequestError(f"{error}; accepted: a schema as JSON") from error
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"{where}: found {schema!r:.60}; accepted: a schema, a JSON object"
        )
    return {"json_schema": schema}


def _read(file: IO[bytes], where: str) -> bytes:
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RequestError(f"{where}: found more than {MAX_BYTES} bytes; make it less")
    return data


def _text(data: bytes, where: str) -> str:
    return decode(data, where).removesuffix("\n").removesuffix("\r")
