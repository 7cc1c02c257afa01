"""JSON payloads of :mod:`inl.protocol.wire`: handshake, limits and errors.

Readers validate everything and raise only :class:`~inl.errors.ProtocolError`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import inl
from inl import errors
from inl.bounded_json import parse_object
from inl.errors import InlError, InvalidJson, ProtocolError, RunnerError
from inl.plugin.hooks import CONTRACT
from inl.protocol.runner import AdapterSource, Limits
from inl.protocol.wire import PROTOCOL
from inl.spec.limits import TOKEN_BUDGET
from inl.spec.message import VERSION
from inl.spec.step import SAMPLERS, Bucket

Buffer = bytes | bytearray
MAX_INT32 = 2**31 - 1
MAX_MESSAGE = 20_000
"""Characters of an error message that are sent."""


class Ready(NamedTuple):
    """A worker's runner: its limits, device and dtype."""

    limits: Limits
    device: str
    dtype: str


def text(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON object."""
    return json.dumps(value).encode()


def read_text(payload: Buffer, what: str) -> dict[str, Any]:
    """Decode a JSON object; ``what`` names it in errors."""
    try:
        return parse_object(bytes(payload), what)
    except InvalidJson as error:
        raise ProtocolError(str(error)) from None


def hello() -> dict[str, Any]:
    """Return the versions of this side."""
    return {
        "protocol": PROTOCOL,
        "message": VERSION,
        "contract": list(CONTRACT),
        "core": inl.__version__,
        "python": platform.python_version(),
    }


def check_hello(payload: Buffer, where: str) -> dict[str, Any]:
    """Decode the other side's :func:`hello` and check that it is compatible.

    Protocol, message layout and the major version of the contract must be equal; the
    version of inl-core may differ.
    """
    ours, theirs = hello(), read_text(payload, f"{where}: HELLO")
    for name in ("protocol", "message"):
        if theirs.get(name) != ours[name]:
            raise _mismatch(where, name, ours, theirs)
    contract = theirs.get("contract")
    if not isinstance(contract, list) or contract[:1] != ours["contract"][:1]:
        raise _mismatch(where, "contract", ours, theirs)
    return theirs


def _mismatch(
    where: str, name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> ProtocolError:
    return ProtocolError(
        f"{where}: found {name} version {theirs.get(name)!r:.40} "
        f"(inl-core {theirs.get('core')!s:.40}), this process has "
        f"{ours[name]!r} (inl-core {ours['core']}); "
        "install the same inl-core in both environments"
    )


def read_limits(value: Any, where: str) -> Limits:
    """Read limits from the JSON form of ``dataclasses.asdict``."""
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: limits: found {value!r:.60}, accepts an object")

    def count(name: str, least: int) -> int:
        return _count(value.get(name), f"{where}: limits.{name}", least)

    blocks = _items(value, "blocks", where)
    if not blocks:
        raise ProtocolError(f"{where}: limits.blocks: found [], needs a group")
    sampler = value.get("sampler")
    if sampler not in SAMPLERS:
        raise ProtocolError(
            f"{where}: limits.sampler: found {sampler!r:.60}, "
            f"accepts {', '.join(SAMPLERS)}"
        )
    return Limits(
        slots=count("slots", 2),
        blocks=tuple(_count(each, f"{where}: limits.blocks", 2) for each in blocks),
        block_size=count("block_size", 1),
        max_blocks_per_seq=count("max_blocks_per_seq", 1),
        vocab=count("vocab", 1),
        buckets=tuple(_bucket(b, where) for b in _items(value, "buckets", where)),
        depth=count("depth", 1),
        sampler=str(sampler),
        windows=_windows(value, len(blocks), where),
        token_budget=_token_budget(value, where),
        decode_steps=_optional(value, "decode_steps", where) or 1,
        max_drafts=_optional(value, "max_drafts", where),
        adapters=_optional(value, "adapters", where),
        adapter_rank=_optional(value, "adapter_rank", where),
        embedding=_optional(value, "embedding", where),
        axes=_optional(value, "axes", where),
        spans=value.get("spans", False) is True,
        feature_layers=tuple(
            _count(each, f"{where}: limits.feature_layers", 0)
            for each in _items({"feature_layers": [], **value}, "feature_layers", where)
        ),
    )


def _windows(
    value: Mapping[str, Any], groups: int, where: str
) -> tuple[int | None, ...]:
    """Windows of the cache groups; may be absent."""
    windows = value.get("windows", [])
    if not isinstance(windows, list) or len(windows) not in (0, groups):
        raise ProtocolError(
            f"{where}: limits.windows: found {windows!r:.60}, "
            f"accepts none or {groups}, one for each group"
        )
    at = f"{where}: limits.windows"
    return tuple(None if each is None else _count(each, at, 1) for each in windows)


def _token_budget(value: Mapping[str, Any], where: str) -> int:
    """Preferred tokens of a step; may be absent."""
    if "token_budget" not in value:
        return TOKEN_BUDGET
    return _count(value["token_budget"], f"{where}: limits.token_budget", 1)


def _optional(value: Mapping[str, Any], name: str, where: str) -> int:
    """A count that may be absent, and then is 0."""
    return _count(value.get(name, 0), f"{where}: limits.{name}", 0)


def _items(value: Mapping[str, Any], name: str, where: str) -> list[Any]:
    items = value.get(name)
    if not isinstance(items, list):
        raise ProtocolError(
            f"{where}: limits.{name}: found {items!r:.60}, accepts a list"
        )
    return items


def _bucket(value: Any, where: str) -> Bucket:
    at = f"{where}: limits.buckets"
    valid = isinstance(value, list) and len(value) in (4, 5)
    if not valid or value[3] not in SAMPLERS:
        raise ProtocolError(
            f"{at}: found {value!r:.60}, accepts tokens, rows, tokens per row, one "
            f"of {', '.join(SAMPLERS)}, and steps"
        )
    tokens, rows, tokens_per_row = (_count(each, at, 1) for each in value[:3])
    # A trace of an earlier version has no steps.
    steps = _count(value[4], at, 1) if len(value) == 5 else 1
    return Bucket(tokens, rows, tokens_per_row, value[3], steps)


def _count(value: Any, where: str, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_INT32:
        raise ProtocolError(
            f"{where}: found {value!r:.60}, accepts a whole number from {least} on"
        )
    return value


def ready(value: Ready) -> bytes:
    """Encode what a worker serves."""
    return text(value._asdict() | {"limits": asdict(value.limits)})


def read_ready(payload: Buffer, where: str) -> Ready:
    """Decode what a worker serves."""
    value = read_text(payload, f"{where}: READY")
    device, dtype = value.get("device"), value.get("dtype")
    if not isinstance(device, str) or not isinstance(dtype, str):
        raise ProtocolError(
            f"{where}: READY: found device and dtype {(device, dtype)!r:.80}, "
            "accepts strings"
        )
    return Ready(read_limits(value.get("limits"), where), device, dtype)


def adapter(source: AdapterSource) -> bytes:
    """Encode an adapter to load."""
    return text(source._asdict())


def read_adapter_source(payload: Buffer, where: str) -> AdapterSource:
    """Decode an adapter to load."""
    value = read_text(payload, where)
    path, digest = value.get("path"), value.get("digest")
    if not isinstance(path, str) or not isinstance(digest, str):
        raise ProtocolError(
            f"{where}: found path and digest {(path, digest)!r:.80}, accepts strings"
        )
    number = _count(value.get("number"), f"{where}: number", 1)
    return AdapterSource(number, path, digest)


def failure(error: BaseException) -> bytes:
    """Encode an error: its class, and its message cut to MAX_MESSAGE characters."""
    message = errors.message(error)[:MAX_MESSAGE]
    return text({"class": type(error).__name__, "message": message})


def read_failure(payload: Buffer, where: str) -> InlError:
    """Decode an error: as its own class if from :mod:`inl.errors`, else RunnerError."""
    value = read_text(payload, f"{where}: ERROR")
    name, message = value.get("class"), value.get("message")
    if not isinstance(name, str) or not isinstance(message, str):
        raise ProtocolError(
            f"{where}: ERROR: found {value!r:.80}, accepts a class and a message"
        )
    kind = vars(errors).get(name)
    if isinstance(kind, type) and issubclass(kind, InlError):
        return kind(f"{where}: {message}")
    return RunnerError(f"{where}: {name}: {message}")
