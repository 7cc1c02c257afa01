"""JSON payloads of :mod:`inl.protocol.wire`: handshake, limits and errors.

Readers validate everything and raise only :class:`~inl.errors.ProtocolError`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import inl
from inl import errors
from inl.bounded_json import parse_object
from inl.errors import InlError, InvalidJson, ProtocolError, RunnerError
from inl.plugin.hooks import CONTRACT, FEATURES
from inl.protocol.runner import AdapterSource, Limits
from inl.protocol.wire import PROTOCOL
from inl.protocol.wire_fields import received, sent
from inl.spec.cache import Slotted
from inl.spec.cache_layout import BlockLayout, CacheLayout
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
    cache: CacheLayout | None = None


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
        "features": sorted({*FEATURES, "encode"}),
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
    """Read limits from the JSON form of :func:`~inl.protocol.wire_fields.sent`."""
    at = f"{where}: limits"
    fields = received(value, Limits, at)
    blocks = _items(fields, "blocks", where)
    if not blocks:
        raise ProtocolError(f"{at}.blocks: found [], needs a group")
    if fields["sampler"] not in SAMPLERS:
        raise ProtocolError(
            f"{at}.sampler: found {fields['sampler']!r:.60}, "
            f"accepts {', '.join(SAMPLERS)}"
        )
    counts = {
        name: _count(fields[name], f"{at}.{name}", least)
        for name, least in LEAST.items()
    }
    return Limits(
        **counts,
        blocks=tuple(_count(each, f"{at}.blocks", 2) for each in blocks),
        buckets=tuple(_bucket(b, where) for b in _items(fields, "buckets", where)),
        sampler=str(fields["sampler"]),
        windows=_windows(fields, len(blocks), where),
        spans=_flag(fields["spans"], f"{at}.spans"),
        feature_layers=tuple(
            _count(each, f"{at}.feature_layers", 0)
            for each in _items(fields, "feature_layers", where)
        ),
    )


LEAST = {
    "slots": 2, "block_size": 1, "max_blocks_per_seq": 1, "vocab": 1, "depth": 1,
    "token_budget": 1, "decode_steps": 1, "max_drafts": 0, "adapters": 0,
    "adapter_rank": 0, "embedding": 0, "stop_ids": 1, "axes": 0, "stages": 1,
    "data_ranks": 1,
}  # fmt: skip
"""Counts among the fields of :class:`~inl.spec.limits.Limits`, with the least value."""


def _windows(
    value: Mapping[str, Any], groups: int, where: str
) -> tuple[int | None, ...]:
    """Windows of the cache groups."""
    windows = value["windows"]
    if not isinstance(windows, (list, tuple)) or len(windows) not in (0, groups):
        raise ProtocolError(
            f"{where}: limits.windows: found {windows!r:.60}, "
            f"accepts none or {groups}, one for each group"
        )
    at = f"{where}: limits.windows"
    return tuple(None if each is None else _count(each, at, 1) for each in windows)


def _flag(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{at}: found {value!r:.60}, accepts true or false")
    return value


def _items(value: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    items = value.get(name)
    if not isinstance(items, (list, tuple)):
        raise ProtocolError(
            f"{where}: limits.{name}: found {items!r:.60}, accepts a list"
        )
    return items


def _bucket(value: Any, where: str) -> Bucket:
    at = f"{where}: limits.buckets"
    if isinstance(value, list) and len(value) <= len(Bucket._fields):
        # Of a trace of an earlier version.
        value = dict(zip(Bucket._fields, value, strict=False))
    fields = received(value, Bucket, at)
    if fields["sampler"] not in SAMPLERS:
        raise ProtocolError(
            f"{at}.sampler: found {fields['sampler']!r:.60}, "
            f"accepts {', '.join(SAMPLERS)}"
        )
    sampler = str(fields.pop("sampler"))
    counts = {
        name: _count(each, f"{at}.{name}", 0 if name == "uniforms" else 1)
        for name, each in fields.items()
    }
    return Bucket(**counts, sampler=sampler)


def _count(value: Any, where: str, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_INT32:
        raise ProtocolError(
            f"{where}: found {value!r:.60}, accepts a whole number from {least} on"
        )
    return value


def ready(value: Ready) -> bytes:
    """Encode what a worker serves."""
    return text(sent(value))


def read_ready(payload: Buffer, where: str) -> Ready:
    """Decode what a worker serves."""
    fields = received(read_text(payload, f"{where}: READY"), Ready, f"{where}: READY")
    device, dtype = fields["device"], fields["dtype"]
    if not isinstance(device, str) or not isinstance(dtype, str):
        raise ProtocolError(
            f"{where}: READY: found device and dtype {(device, dtype)!r:.80}, "
            "accepts strings"
        )
    layout = _layout(fields["cache"], f"{where}: READY: cache")
    limits = read_limits(fields["limits"], where)
    return Ready(limits=limits, device=device, dtype=dtype, cache=layout)


def _layout(value: Any, where: str) -> CacheLayout | None:
    """Read a cache layout, which may be absent."""
    if value is None:
        return None
    fields = received(value, CacheLayout, where)
    groups = _each(fields["groups"], BlockLayout, f"{where}.groups")
    slotted = _each(fields["slotted"], Slotted, f"{where}.slotted")
    for group in groups:
        for name in ("layers", "block_size", "kv_heads", "head_dim"):
            _count(group[name], f"{where}.groups.{name}", 1)
    for item in slotted:
        for size in item["shape"]:
            _count(size, f"{where}.slotted.shape", 1)
        item["shape"] = tuple(item["shape"])
        item["restores"] = tuple(item["restores"])
    names = [group["dtype"] for group in groups]
    names += [item[key] for item in slotted for key in ("name", "dtype")]
    if not all(isinstance(name, str) for name in names):
        raise ProtocolError(f"{where}: found {names!r:.80}, accepts strings")
    return CacheLayout(
        tuple(
            BlockLayout(**group | {"scales": tuple(group["scales"])})
            for group in groups
        ),
        tuple(Slotted(**item) for item in slotted),
    )


def _each(value: Any, kind: type, where: str) -> list[dict[str, Any]]:
    """Read a list of the fields of values; lists of them stay lists."""
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(f"{where}: found {value!r:.60}, accepts a list")
    items = [received(item, kind, where) for item in value]
    for item in items:
        for name in ("scales", "shape", "restores"):
            if name in item and not isinstance(item[name], (list, tuple)):
                raise ProtocolError(
                    f"{where}.{name}: found {item[name]!r:.60}, accepts a list"
                )
    return items


def adapter(source: AdapterSource) -> bytes:
    """Encode an adapter to load."""
    return text(sent(source))


def read_adapter_source(payload: Buffer, where: str) -> AdapterSource:
    """Decode an adapter to load."""
    fields = received(read_text(payload, where), AdapterSource, where)
    path, digest = fields["path"], fields["digest"]
    if not isinstance(path, str) or not isinstance(digest, str):
        raise ProtocolError(
            f"{where}: found path and digest {(path, digest)!r:.80}, accepts strings"
        )
    number = _count(fields["number"], f"{where}: number", 1)
    return AdapterSource(number=number, path=path, digest=digest)


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
