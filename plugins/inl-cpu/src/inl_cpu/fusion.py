"""Folds recorded instructions into the ones that the library computes at once.

A norm goes into the product that reads it, and rotation and norms of heads go into
attention. An instruction is folded away only where nothing else reads what it wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from inl_cpu.abi import Opcode
from inl_cpu.recording import Call, Operand, PythonStep

Item = Call | PythonStep


def fuse(items: Sequence[Item], outputs: Set[int]) -> list[Item]:
    """Fold what can be; ``outputs`` are the loans that are read after the program."""
    readers: Counter[int] = Counter(outputs)
    for item in items:
        readers.update(item.reads)
    done: list[Item] = []
    for item in items:
        if isinstance(item, Call) and item.opcode == Opcode.LINEAR:
            item = _with_norm(item, done, readers)
        elif isinstance(item, Call) and item.opcode == Opcode.ATTENTION:
            item = _with_heads(item, done, readers)
        done.append(item)
    return done


def _only(operand: Operand, readers: Counter[int]) -> bool:
    """Whether a place is scratch that one instruction alone reads."""
    return operand.lease > 0 and readers[operand.lease] == 1


def _with_norm(linear: Call, done: list[Item], readers: Counter[int]) -> Call:
    """Normalize the operand of a product in it, after adding where that is asked."""
    norm = done[-1] if done else None
    if not isinstance(norm, Call) or not _only(linear.at(0), readers):
        return linear
    folded = _folded_norm(linear, norm)
    if folded is None or not folded.clear:
        return linear
    done.pop()
    return folded


def _folded_norm(linear: Call, norm: Call) -> Call | None:
    x, flags = linear.at(0), linear.flags | norm.flags
    if norm.opcode == Opcode.ADD_NORM and norm.at(4) == x:
        residual, delta, weight, total, _ = norm.data
        data = (residual, *linear.data[1:4], delta, weight, total)
        return replace(linear, data=data, reals=norm.reals, flags=flags)
    if norm.opcode == Opcode.RMS_NORM and norm.at(2) == x and norm.dims[1] == 1:
        data = (norm.at(0), *linear.data[1:4], Operand(), norm.at(1))
        dims = (linear.dims[0], norm.dims[3], *linear.dims[2:])
        return replace(linear, dims=dims, data=data, reals=norm.reals, flags=flags)
    return None


def _with_heads(attention: Call, done: list[Item], readers: Counter[int]) -> Call:
    """Rotate q and k in attention, and normalize their heads in it before that."""
    found = _producers(attention, done, readers)
    if not found:
        return attention
    q, k, v = found[0], found[1], found.get(2)
    v_stride = v.dims[2] if v else attention.dims[9]
    if q.data[1:3] != k.data[1:3] or k.dims[3] != v_stride:
        return attention
    value = v.at(0) if v else attention.at(2)
    data = (q.at(0), k.at(0), value, *attention.data[3:12], *q.data[1:3])
    dims = (*attention.dims[:8], q.dims[3], k.dims[3])
    folded = replace(attention, dims=dims, data=data)
    if not folded.clear:
        return attention
    _remove(done, found.values())
    return _with_head_norms(folded, done, readers)


def _producers(
    attention: Call, done: list[Item], readers: Counter[int]
) -> dict[int, Call]:
    """The rotations just before that made q and k, and the copy that made v."""
    found: dict[int, Call] = {}
    for item in reversed(done[-4:]):
        if not isinstance(item, Call):
            break
        if item.opcode == Opcode.ROPE:
            made, places = item.at(3), (0, 1)
        elif item.opcode == Opcode.COPY:
            made, places = item.at(1), (1, 2)
        else:
            break
        place = next((p for p in places if attention.at(p) == made), None)
        if place is None or not _only(made, readers):
            break
        found[place] = item
    rotations = [found.get(p) for p in (0, 1)]
    if any(call is None or call.opcode != Opcode.ROPE for call in rotations):
        return {}
    return found


def _with_head_norms(attention: Call, done: list[Item], readers: Counter[int]) -> Call:
    """Fold the norms of q and k, of one eps, where both are there."""
    norms = {
        item.at(2): item
        for item in done[-2:]
        if isinstance(item, Call) and item.opcode == Opcode.RMS_NORM
    }
    q, k = norms.get(attention.at(0)), norms.get(attention.at(1))
    if q is None or k is None or (q.reals, q.flags) != (k.reals, k.flags):
        return attention
    alone = _only(q.at(2), readers) and _only(k.at(2), readers)
    weighted = q.at(1).address and k.at(1).address
    if not alone or not weighted or k.dims[3] != attention.dims[9]:
        return attention
    data = (q.at(0), k.at(0), *attention.data[2:14], q.at(1), k.at(1))
    folded = replace(
        attention,
        dims=(*attention.dims[:8], q.dims[3], k.dims[3]),
        data=data,
        reals=(*attention.reals, *q.reals),
        flags=attention.flags | q.flags,
    )
    if not folded.clear:
        return attention
    _remove(done, (q, k))
    return folded


def _remove(done: list[Item], calls: Iterable[Call]) -> None:
    gone = {id(call) for call in calls}
    done[:] = [item for item in done if id(item) not in gone]
