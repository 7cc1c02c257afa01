"""What the payloads of :mod:`inl.protocol.wire` hold, read with suspicion.

Every reader raises :class:`~inl.errors.ProtocolError` and nothing else.
"""

from __future__ import annotations

import json
import platform
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import inl
from inl import errors
from inl.errors import InlError, ProtocolError, RunnerError
from inl.plugin.hooks import CONTRACT
from inl.protocol.runner import Limits, Reply
from inl.protocol.wire import PROTOCOL
from inl.spec.limits import TOKEN_BUDGET
from inl.spec.message import VERSION
from inl.spec.step import SAMPLERS, Bucket, Scores
from inl.weights.progress import LoadStage

if TYPE_CHECKING:
    from inl.spec.message import IntArray

Buffer = bytes | bytearray
MAX_INT32 = 2**31 - 1
PROGRESS = struct.Struct("<qqq")
STAGES = tuple(LoadStage)


class Ready(NamedTuple):
    """What a worker says of the runner that it serves."""

    limits: Limits
    device: str
    dtype: str


def text(value: Mapping[str, Any]) -> bytes:
    """Write a JSON object."""
    return json.dumps(value).encode()


def read_text(payload: Buffer, what: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(payload.decode())
    # Deep nesting ends the recursion of the reader, not of ours.
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"{what}: found {value!r:.60}, accepts a JSON object")
    return value


def hello() -> dict[str, Any]:
    """What this side speaks."""
    return {
        "protocol": PROTOCOL,
        "message": VERSION,
        "contract": list(CONTRACT),
        "core": inl.__version__,
        "python": platform.python_version(),
    }


def check_hello(payload: Buffer, where: str) -> dict[str, Any]:
    """Read the other side's :func:`hello`; refuse one that we cannot speak with.

    Another version of inl-core is fine as long as protocol, message layout and the
    major version of the contract are ours.
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
        f"{where}: speaks {name} {theirs.get(name)!r:.40} "
        f"(inl-core {theirs.get('core')!s:.40}), this process speaks "
        f"{name} {ours[name]!r} (inl-core {ours['core']}); "
        "install the same inl-core in both environments"
    )


def read_limits(value: Any, where: str) -> Limits:
    """Read limits from the JSON form of ``dataclasses.asdict``."""
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: limits: found {value!r:.60}, accepts an object")
    sizes = {
        name: _count(value.get(name), f"{where}: limits.{name}", least)
        for name, least in (
            ("slots", 2), ("block_size", 1), ("max_blocks_per_seq", 1), ("vocab", 1), ("depth", 1),
        )
    }  # fmt: skip
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
        sizes["slots"],
        tuple(_count(each, f"{where}: limits.blocks", 2) for each in blocks),
        sizes["block_size"],
        sizes["max_blocks_per_seq"],
        sizes["vocab"],
        buckets=tuple(_bucket(b, where) for b in _items(value, "buckets", where)),
        depth=sizes["depth"],
        sampler=str(sampler),
        windows=_windows(value, len(blocks), where),
        token_budget=_budget(value, where),
    )


def _windows(
    value: Mapping[str, Any], groups: int, where: str
) -> tuple[int | None, ...]:
    """Windows of the groups; a side that knows none leaves them out."""
    found = value.get("windows", [])
    if not isinstance(found, list) or len(found) not in (0, groups):
        raise ProtocolError(
            f"{where}: limits.windows: found {found!r:.60}, "
            f"accepts none or {groups}, one for each group"
        )
    at = f"{where}: limits.windows"
    return tuple(None if each is None else _count(each, at, 1) for each in found)


def _budget(value: Mapping[str, Any], where: str) -> int:
    """What a step likes to hold; a side that has no preference leaves it out."""
    if "token_budget" not in value:
        return TOKEN_BUDGET
    return _count(value["token_budget"], f"{where}: limits.token_budget", 1)


def _items(value: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list):
        raise ProtocolError(
            f"{where}: limits.{name}: found {found!r:.60}, accepts a list"
        )
    return found


def _bucket(value: Any, where: str) -> Bucket:
    at = f"{where}: limits.buckets"
    if not isinstance(value, list) or len(value) != 4 or value[3] not in SAMPLERS:
        raise ProtocolError(
            f"{at}: found {value!r:.60}, accepts tokens, rows, width and one of "
            f"{', '.join(SAMPLERS)}"
        )
    tokens, rows, width = (_count(each, at, 1) for each in value[:3])
    return Bucket(tokens, rows, width, value[3])


def _count(value: Any, where: str, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_INT32:
        raise ProtocolError(
            f"{where}: found {value!r:.60}, accepts a whole number from {least} on"
        )
    return value


def ready(served: Ready) -> bytes:
    """Write what a worker serves."""
    return text(served._asdict() | {"limits": asdict(served.limits)})


def read_ready(payload: Buffer, where: str) -> Ready:
    """Read what a worker serves."""
    found = read_text(payload, f"{where}: READY")
    names = found.get("device"), found.get("dtype")
    if not all(isinstance(name, str) for name in names):
        raise ProtocolError(f"{where}: READY: found device and dtype {names!r:.80}")
    return Ready(read_limits(found.get("limits"), where), str(names[0]), str(names[1]))


def ints(payload: Buffer, what: str) -> IntArray:
    """Read int32 words; the array shares the payload's memory."""
    if len(payload) % 4:
        raise ProtocolError(
            f"{what}: found {len(payload)} bytes, accepts whole int32 words"
        )
    return np.frombuffer(payload, "<i4").astype(np.int32, copy=False)


def words(array: IntArray) -> memoryview:
    """Bytes of an int32 array, without a copy where it is contiguous already."""
    return np.ascontiguousarray(array, "<i4").reshape(-1).data.cast("B")


def masks(step: int, rows: IntArray) -> memoryview:
    """Write the masks of a step, int32 [R, words]."""
    head = np.array([step, *rows.shape], np.int32)
    return words(np.concatenate([head, rows.reshape(-1)]))


def read_masks(payload: Buffer) -> tuple[int, IntArray]:
    """Read the masks of a step."""
    found = ints(payload, "masks")
    if len(found) < 3:
        raise ProtocolError(f"masks: found {len(found)} words, needs at least 3")
    step, rows, width = (int(word) for word in found[:3])
    if min(rows, width) < 0 or len(found) != 3 + rows * width:
        raise ProtocolError(
            f"masks of step {step}: found {len(found)} words for [{rows}, {width}]"
        )
    return step, found[3:].reshape(rows, width)


def reply(found: Reply) -> memoryview:
    """Write what a step chose; scores come last, after how many ids each has."""
    rows, width = found.tokens.shape
    head = np.array([found.step, rows, width], np.int32)
    parts = [head, found.tokens.reshape(-1), found.accepted]
    if found.scores is not None:
        chosen, ids, values = found.scores
        parts += [
            np.array(ids.shape[1:], np.int32),
            chosen.astype(np.float32).view(np.int32),
            ids.reshape(-1),
            values.astype(np.float32).reshape(-1).view(np.int32),
        ]
    return words(np.concatenate(parts).astype(np.int32, copy=False))


def read_reply(payload: Buffer) -> Reply:
    """Read what a step chose."""
    found = ints(payload, "reply")
    if len(found) < 3:
        raise ProtocolError(f"reply: found {len(found)} words, needs at least 3")
    step, rows, width = found[:3].tolist()
    split = 3 + rows * width
    rest = found[split + rows :] if min(rows, width) >= 1 else found
    top = int(rest[0]) if len(rest) else 0
    size = 1 + rows * width * (1 + 2 * top)
    if (
        min(rows, width) < 1
        or top < 0
        or len(found)
        not in (
            split + rows,
            split + rows + size,
        )
    ):
        raise ProtocolError(
            f"reply of step {step}: found {len(found)} words for [{rows}, {width}]"
        )
    tokens = found[3:split].reshape(rows, width)
    scores = _read_scores(rest[1:], rows * width, top) if len(rest) else None
    return Reply(step, tokens, found[split : split + rows], scores)


def _read_scores(found: IntArray, samples: int, top: int) -> Scores:
    split = samples * (1 + top)
    return Scores(
        found[:samples].view(np.float32),
        found[samples:split].reshape(samples, top),
        found[split:].view(np.float32).reshape(samples, top),
    )


def failure(error: BaseException) -> bytes:
    """Write an error: its class and its message, cut to a page."""
    return text({"class": type(error).__name__, "message": str(error)[:20_000]})


def read_failure(payload: Buffer, where: str) -> InlError:
    """Read an error: one of :mod:`inl.errors` as its own class, others by name."""
    found = read_text(payload, f"{where}: ERROR")
    name, message = found.get("class"), found.get("message")
    if not isinstance(name, str) or not isinstance(message, str):
        raise ProtocolError(f"{where}: ERROR: found {found!r:.80}")
    kind = vars(errors).get(name)
    if isinstance(kind, type) and issubclass(kind, InlError):
        return kind(f"{where}: {message}")
    return RunnerError(f"{where}: {name}: {message}")


def progress(done: int, total: int, stage: LoadStage) -> bytes:
    """Encode a progress report; the stage is sent as its index in ``LoadStage``."""
    return PROGRESS.pack(done, total, STAGES.index(stage))


def read_progress(payload: Buffer) -> tuple[int, int, LoadStage]:
    """Decode a progress report: done, total, stage."""
    if len(payload) != PROGRESS.size:
        raise ProtocolError(f"progress: found {len(payload)} bytes, accepts 24")
    done, total, stage = PROGRESS.unpack(payload)
    if not 0 <= stage < len(STAGES):
        raise ProtocolError(
            f"progress: stage: found {stage}, accepts 0 to {len(STAGES) - 1}"
        )
    return done, total, STAGES[stage]
