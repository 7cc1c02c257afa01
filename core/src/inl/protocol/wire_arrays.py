"""Binary payloads of :mod:`inl.protocol.wire`: frames, masks, replies, contents.

Readers validate everything and raise only :class:`~inl.errors.ProtocolError`.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np

from inl.bounded_json import parse_object
from inl.dtypes import SIZES, HostArray
from inl.errors import InvalidJson, ProtocolError
from inl.progress import LoadStage
from inl.protocol.runner import Reply, pooled_reply
from inl.spec.cache_layout import BITS, Part, stored_bits
from inl.spec.encoder import TokenSequence
from inl.spec.message import TRANSFER_SIZE
from inl.spec.step import Scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inl.spec.cache_layout import Parts
    from inl.spec.message import IntArray

Buffer = bytes | bytearray | memoryview
PROGRESS = struct.Struct("<qqq")
STAGES = tuple(LoadStage)
ALIGNED = 64
"""Alignment of the arrays in contents, in bytes."""
MAX_HEAD = 1 << 16
"""Longest list of the parts of contents, in bytes."""


def ints(payload: Buffer, what: str) -> IntArray:
    """Decode int32 words; the array shares the payload's memory."""
    if len(payload) % 4:
        raise ProtocolError(
            f"{what}: found {len(payload)} bytes, accepts whole int32 words"
        )
    return np.frombuffer(payload, "<i4").astype(np.int32, copy=False)


def words(array: IntArray) -> memoryview:
    """Encode an int32 array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array, "<i4").reshape(-1).data.cast("B")


def sequences(given: Sequence[TokenSequence]) -> memoryview:
    """Encode sequences of token ids and the kinds of their segments."""
    lengths = [len(each.tokens) for each in given]
    tokens = [np.asarray(each.tokens, np.int32) for each in given]
    kinds = [
        np.asarray(each.kinds or np.zeros(length), np.int32)
        for each, length in zip(given, lengths, strict=True)
    ]
    head = np.array([len(given), *lengths], np.int32)
    return words(np.concatenate([head, *tokens, *kinds]))


def read_sequences(payload: Buffer) -> list[TokenSequence]:
    """Decode sequences of token ids."""
    data = ints(payload, "sequences").tolist()
    count = data[0] if data else -1
    lengths = data[1 : 1 + max(count, 0)]
    total = sum(lengths)
    fits = len(lengths) == count and len(data) == 1 + count + 2 * total
    if not fits or any(length < 1 for length in lengths):
        raise ProtocolError(
            f"sequences: found {len(data)} words for {count} sequences of {total} "
            "tokens, accepts a count, lengths of 1 or more and two words for each token"
        )
    found, at = [], 1 + count
    for length in lengths:
        end = at + length
        found.append(TokenSequence(data[at:end], data[at + total : end + total]))
        at = end
    return found


def results(rows: NDArray[np.float32]) -> bytes:
    """Encode the results [N, K] of sequences."""
    return np.array(rows.shape, "<i4").tobytes() + rows.astype("<f4").tobytes()


def read_results(payload: Buffer, count: int) -> NDArray[np.float32]:
    """Decode the results [N, K] of ``count`` sequences."""
    data = ints(payload, "results")
    rows, width = data[:2].tolist() if len(data) > 1 else (-1, -1)
    if rows != count or width < 0 or len(data) != 2 + rows * width:
        raise ProtocolError(
            f"results: found {len(data)} words for {rows} x {width} numbers, expected "
            f"{count} rows"
        )
    return data[2:].view(np.float32).reshape(rows, width).copy()


def masks(step: int, rows: IntArray) -> memoryview:
    """Encode the token masks of a step, int32 [R, words]."""
    head = np.array([step, *rows.shape], np.int32)
    return words(np.concatenate([head, rows.reshape(-1)]))


def read_masks(payload: Buffer) -> tuple[int, IntArray]:
    """Decode the step and its token masks, int32 [R, words]."""
    data = ints(payload, "masks")
    if len(data) < 3:
        raise ProtocolError(f"masks: found {len(data)} words, needs at least 3")
    step, rows, mask_words = data[:3].tolist()
    if min(rows, mask_words) < 0 or len(data) != 3 + rows * mask_words:
        raise ProtocolError(
            f"masks of step {step}: found {len(data)} words for [{rows}, {mask_words}]"
        )
    return step, data[3:].reshape(rows, mask_words)


def content_pieces(parts: Parts) -> list[bytes | memoryview]:
    """Encode contents of a cache in pieces, most of which share their memory."""
    head = {name: [part.dtype, *part.shape] for name, part in parts.items()}
    text = json.dumps(head).encode()
    text += b" " * (-(4 + len(text)) % ALIGNED)
    data = [
        stored_bits(part).reshape(-1).view(np.uint8).data for part in parts.values()
    ]
    return [struct.pack("<i", len(text)) + text, *data]


def contents(parts: Parts) -> bytes:
    """Encode contents of a cache."""
    return b"".join(content_pieces(parts))


def read_contents(payload: Buffer) -> Parts:
    """Decode contents of a cache; the arrays share the payload's memory."""
    view = memoryview(payload)
    start = 4 + struct.unpack("<i", view[:4])[0] if len(view) >= 4 else -1
    if not 4 <= start <= min(len(view), 4 + MAX_HEAD):
        raise ProtocolError(f"contents: found {len(view)} bytes, {start} of a head")
    try:
        listed = parse_object(bytes(view[4:start]), "contents").items()
        parts = {name: Part(dtype, (*shape,)) for name, (dtype, *shape) in listed}
        sizes = [part.nbytes for part in parts.values()]
    except (InvalidJson, ValueError, TypeError) as error:
        raise ProtocolError(
            f"contents: found a head that is not valid: {error}"
        ) from None
    valid = all(
        part.dtype in (*SIZES, *BITS) and all(_is_size(size) for size in part.shape)
        for part in parts.values()
    )
    if not valid or start + sum(sizes) != len(view):
        raise ProtocolError(
            f"contents: found {len(view)} bytes, the head lists {parts!r:.200}"
        )
    found: dict[str, HostArray] = {}
    for (name, part), size in zip(parts.items(), sizes, strict=True):
        bits = np.frombuffer(
            view[start : start + size], BITS.get(part.dtype, part.dtype)
        )
        found[name] = HostArray(bits.reshape(part.shape), part.dtype, part.shape)
        start += size
    return found


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def write(message: IntArray, parts: Parts) -> bytes:
    """Encode a WRITE frame and its contents."""
    return bytes(words(message)) + contents(parts)


def read_write(payload: Buffer) -> tuple[IntArray, Parts]:
    """Decode a WRITE frame and its contents."""
    size = 4 * TRANSFER_SIZE
    return ints(payload[:size], "WRITE"), read_contents(payload[size:])


def reply(result: Reply) -> memoryview:
    """Encode the result of a step; scores follow S, samples, and N, ids of each.

    Hidden states [R, H] take the place of tokens, of which there are -H in the head.
    With loads of experts [L, E] the head has -R, and they follow it after L and E.
    """
    if result.loads is not None:
        counts = np.asarray(result.loads, np.int32)
        rest = np.frombuffer(reply(result._replace(loads=None)), np.int32)
        head = np.array([rest[0], -rest[1], rest[2], *counts.shape], np.int32)
        return words(np.concatenate([head, counts.reshape(-1), rest[3:]]))
    if result.hidden is not None:
        count, width = result.hidden.shape
        head = np.array([result.step, count, -width], np.int32)
        values = np.ascontiguousarray(result.hidden, np.float32).view(np.int32)
        return words(np.concatenate([head, values.reshape(-1)]))
    rows, tokens_per_row = result.tokens.shape
    parts = [
        np.array([result.step, rows, tokens_per_row], np.int32),
        result.tokens.reshape(-1),
    ]
    if result.scores is not None:
        chosen, ids, values = result.scores
        parts += [
            np.array(ids.shape, np.int32),
            chosen.astype(np.float32).view(np.int32),
            ids.reshape(-1),
            values.astype(np.float32).reshape(-1).view(np.int32),
        ]
    return words(np.concatenate(parts).astype(np.int32, copy=False))


def read_reply(payload: Buffer) -> Reply:
    """Decode the result of a step."""
    data = ints(payload, "reply")
    if len(data) < 3:
        raise ProtocolError(f"reply: found {len(data)} words, needs at least 3")
    step, rows, tokens_per_row = data[:3].tolist()
    if rows < 0:
        layers, experts = data[3:5].tolist() if len(data) > 4 else (0, 0)
        rest = 5 + layers * experts
        if min(layers, experts) < 1 or len(data) < rest:
            raise ProtocolError(
                f"reply of step {step}: found {len(data)} words for loads of "
                f"[{layers}, {experts}]"
            )
        head = np.array([step, -rows, tokens_per_row], np.int32)
        inner = read_reply(bytes(words(np.concatenate([head, data[rest:]]))))
        return inner._replace(loads=data[5:rest].reshape(layers, experts))
    if rows >= 1 and tokens_per_row < 0 and len(data) == 3 - rows * tokens_per_row:
        return pooled_reply(step, data[3:].view(np.float32).reshape(rows, -1))
    samples = rows * tokens_per_row
    scored = data[3 + samples :] if min(rows, tokens_per_row) >= 1 else data
    count, top = scored[:2].tolist() if len(scored) > 1 else (0, 0)
    sizes = 3 + samples, 3 + samples + 2 + count * (1 + 2 * top)
    wrong = min(rows, tokens_per_row) < 1 or min(count, top) < 0
    if wrong or len(data) not in sizes:
        raise ProtocolError(
            f"reply of step {step}: found {len(data)} words for "
            f"[{rows}, {tokens_per_row}]"
        )
    tokens = data[3 : 3 + samples].reshape(rows, tokens_per_row)
    return Reply(
        step, tokens, _read_scores(scored[2:], count, top) if len(scored) else None
    )


def _read_scores(data: IntArray, samples: int, top: int) -> Scores:
    split = samples * (1 + top)
    return Scores(
        chosen=data[:samples].view(np.float32),
        ids=data[samples:split].reshape(samples, top),
        values=data[split:].view(np.float32).reshape(samples, top),
    )


def progress(done: int, total: int, stage: LoadStage) -> bytes:
    """Encode a progress report; the stage is sent as its index in ``LoadStage``."""
    return PROGRESS.pack(done, total, STAGES.index(stage))


def read_progress(payload: Buffer) -> tuple[int, int, LoadStage]:
    """Decode a progress report: done, total, stage."""
    if len(payload) != PROGRESS.size:
        raise ProtocolError(
            f"progress: found {len(payload)} bytes, accepts {PROGRESS.size}"
        )
    done, total, stage = PROGRESS.unpack(payload)
    if not 0 <= stage < len(STAGES):
        raise ProtocolError(
            f"progress: stage: found {stage}, accepts 0 to {len(STAGES) - 1}"
        )
    return done, total, STAGES[stage]
