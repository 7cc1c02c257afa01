"""Checks of copies between a cache and the host: blocks, slots and addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.block_io import Addresses
from inl.dtypes import E4M3, HostArray, cast, wrap
from inl.errors import RunnerError
from inl.executor.cache_transfers import CacheTransfers
from inl.spec.cache import Paged, Slotted
from inl.spec.cache_layout import SLOT_GROUP, Parts, stored_bits
from inl.spec.limits import Limits
from inl.spec.message import READ, WRITE, admit_frame, transfer_frame
from inl.testing.check import Check, CheckFailed, equal, require
from inl.testing.filled_cache import BLOCKS, FilledCache, numbers_of, stored
from inl.testing.oracle import Tiny
from inl.testing.play import admission, most_tokens, one_step
from inl.testing.runner_frames import first_blocks, opened, some_ids

if TYPE_CHECKING:
    from inl.testing.filled_cache import Numbers
    from inl.testing.target import Target

COPIED = ([3], [3, 1, 7, 19, 2])
"""Blocks that are read together: one, and several out of order, the last of which are
partly filled and in the middle of others."""

HELD = [5, 11, 4, 18, 9]
"""Blocks that other contents are written to."""

INT8_ERROR = 0.51
"""Largest error of a number in int8, in units of its scale."""


def block_checks(target: Target) -> Iterator[Check]:
    """Yield checks of each compute dtype, with each dtype of the cache."""
    for dtype in target.dtypes:
        tiny = Tiny(target, dtype)
        for kv_dtype in dict.fromkeys((dtype, *target.backend.traits.kv_dtypes)):
            setting = "auto" if kv_dtype == dtype else kv_dtype
            runs: dict[str, Callable[[], None]] = {
                "read": partial(_read, target, dtype, kv_dtype),
                "write": partial(_write, target, dtype, kv_dtype),
                "moved": partial(_moved, tiny, "fp8" if setting == E4M3 else setting),
            }
            for name, run in runs.items():
                yield Check("blocks", f"blocks/{name}/{dtype}/kv {kv_dtype}", run)
        yield Check("blocks", f"slots/{dtype}", partial(_slots, target, dtype))
    yield Check("blocks", "addresses", partial(_addresses, target))


def _read(target: Target, dtype: str, kv_dtype: str) -> None:
    """Blocks have the contents that write_kv has written."""
    cache = FilledCache.made(target, dtype, kv_dtype)
    if _is_refused(cache):
        return
    for group, paged in enumerate(cache.groups):
        for ids in COPIED:
            found, numbers = cache.read(group, ids), cache.numbers[group]
            expected = stored(numbers, paged, ids)
            around = stored(numbers, paged, list(range(BLOCKS)))
            what = f"BlockIO.read of blocks {ids} of group {group} in {kv_dtype}"
            exact = numbers[:, :, ids] if kv_dtype == "int8" else None
            _compare(what, found, expected, around, ids, exact=exact)


def _write(target: Target, dtype: str, kv_dtype: str) -> None:
    """Blocks have other contents afterwards, and only the named ones."""
    cache = FilledCache.made(target, dtype, kv_dtype)
    if _is_refused(cache):
        return
    others = FilledCache.made(target, dtype, kv_dtype, "others")
    for group, paged in enumerate(cache.groups):
        for ids in ([HELD[0]], HELD):
            what = f"BlockIO.write to blocks {ids} of group {group} in {kv_dtype}"
            rest = [b for b in range(1, BLOCKS) if b not in ids]
            parts = [rest[:16], rest[16:]]
            before = [cache.read(group, part) for part in parts if part]
            other = [others.read(at, HELD) for at in range(len(cache.groups))]
            contents = stored(others.numbers[group], paged, ids)
            cache = cache.written(group, ids, contents)
            after = [cache.read(group, part) for part in parts if part]
            for part, old, new in zip(parts, before, after, strict=False):
                _require_unchanged(what, part, old, new)
            around = stored(others.numbers[group], paged, list(range(BLOCKS)))
            _compare(what, cache.read(group, ids), contents, around, ids)
            for at, parts_of in enumerate(other):
                same = _same(others.read(at, HELD), parts_of)
                require(same, f"{what}: another state has changed, in group {at}")


def _is_refused(cache: FilledCache) -> bool:
    """Whether the backend copies nothing; the error must name what it lacks."""
    if not cache.transfers.refusal:
        return False
    try:
        cache.transfers.read(cache.state, 0, [1])
    except RunnerError as error:
        require("BlockIO" in str(error), f"refusal of a read: found {error}")
        return True
    raise CheckFailed("a backend without BlockIO has read blocks")


def _compare(
    what: str, found: Parts, expected: Parts, around: Parts, ids: list[int],
    *, exact: Numbers | None = None,
) -> None:  # fmt: skip
    """Raise :class:`CheckFailed` that says how contents differ.

    around: expected contents of all blocks. exact: numbers before they were rounded to
    int8, which ties may round either way.
    """
    numbers, wanted = numbers_of(found), numbers_of(expected)
    bound = np.zeros(wanted.shape)
    if exact is not None:
        wanted, bound = exact, bound + INT8_ERROR * expected["scales"].data[..., None]
    if _close(numbers, wanted, bound):
        return
    every = numbers_of(around)
    near = [(np.array(ids) + shift) % BLOCKS for shift in (1, -1)]
    layers = [_close(*each) for each in zip(numbers, wanted, bound, strict=True)]
    if _close(numbers[:, ::-1], wanted, bound + bound[:, ::-1]):
        reason = "keys and values are swapped"
    elif any(_close(numbers, every[:, :, other], bound + 1e-2) for other in near):
        reason = "the contents are those of the blocks beside"
    elif "scales" in found and _same_cells(found, expected):
        reason = "the cells are right; the scales are missing or wrong"
    elif any(layers):
        wrong = [at for at, right in enumerate(layers) if not right]
        reason = f"layers {wrong} of the group are wrong, the others right"
    else:
        at = tuple(int(i[0]) for i in np.nonzero(np.abs(numbers - wanted) > bound))
        reason = (
            f"found {numbers[at]:.6g} at {list(at)} of [layers, 2, n, block_size, "
            f"kv_heads, head_dim], expected {wanted[at]:.6g}"
            if at
            else "found NaN"
        )
    raise CheckFailed(f"{what}: {reason}")


def _close(found: Any, expected: Any, bound: Any) -> bool:
    return bool((np.abs(found - expected) <= bound).all())


def _same_cells(found: Parts, expected: Parts) -> bool:
    cells = found["cells"].data.astype(np.int32), expected["cells"].data
    return bool((np.abs(cells[0] - cells[1]) <= 1).all())


def _same(found: Parts, expected: Parts) -> bool:
    return all(
        np.array_equal(stored_bits(found[name]), stored_bits(expected[name]))
        for name in expected
    )


def _require_unchanged(what: str, ids: list[int], old: Parts, new: Parts) -> None:
    for name, part in old.items():
        if len(part.shape) < 3:
            continue
        before, after = stored_bits(part), stored_bits(new[name])
        for at, block in enumerate(ids):
            same = np.array_equal(before[:, :, at], after[:, :, at])
            require(same, f"{what}: block {block}, which is not named, has changed")


def _moved(tiny: Tiny, kv_dtype: str) -> None:
    """A sequence goes on in another runner as in its own, from a partial block."""
    changes = {} if kv_dtype == "auto" else {"kv_dtype": kv_dtype}
    with opened(tiny, **changes) as own, opened(tiny, **changes) as other:
        if own.cache_layout is None:
            return
        limits = own.limits
        ids = some_ids(tiny, most_tokens(limits, 37), "moved")
        count = len(first_blocks(own, len(ids)))
        table = first_blocks(own, limits.max_blocks_per_seq * limits.block_size)
        own.submit(admission(limits, 1, table))
        own.submit(one_step(limits, [(1, ids)], step=1, decoding=0))
        first = int(own.collect().tokens[0, 0])
        held = table[::-1]
        last = count - 1  # all in one, and one by one
        own.submit(transfer_frame(READ, 0, table[last:count]))
        other.write(transfer_frame(WRITE, 0, held[last:count]), own.read())
        if last:
            own.submit(transfer_frame(READ, 0, table[:last]))
            blocks = own.read_blocks(last)
            other.write_blocks(transfer_frame(WRITE, 0, held[:last]), blocks)
        other.submit(
            admit_frame(
                2, [held], groups=1, max_blocks_per_seq=limits.max_blocks_per_seq,
                length=len(ids), last=first,
            )
        )  # fmt: skip
        answers = []
        for runner, slot, start in ((own, 1, 2), (other, 2, 1)):
            tokens = []
            for step in range(start, start + 6):
                frame = one_step(limits, [(slot, [-1])], step=step, decoding=1)
                runner.submit(frame)
                tokens.append(int(runner.collect().tokens[0, 0]))
            answers.append(tokens)
    equal(f"answer after {len(ids)} tokens in another runner", answers[1], answers[0])


def _slots(target: Target, dtype: str) -> None:
    """The state of a slot is read and written; others keep theirs."""
    backend = target.backend
    limits = Limits(slots=4, blocks=(3,), block_size=16, max_blocks_per_seq=2, vocab=11)
    spec = (
        Paged((0,), 1, 16, dtype),
        Slotted("velocity", (6,), dtype, "replay"),
        Slotted("matrix", (2, 3, 4), "float32", "tokens"),
    )
    state = backend.state(spec, limits=limits)
    copies = CacheTransfers(backend, target.selection, spec, limits, state)
    if copies.refusal:
        return
    rng, expected = target.rng("slots", dtype), {}
    for slot in (1, 2, 3, 2):
        expected[slot] = {
            item.name: cast(rng.standard_normal(item.shape), item.dtype)
            for item in spec[1:]
        }
        program, *arguments = copies.write(SLOT_GROUP, [slot], [expected[slot]])
        (state,) = program(*arguments, state)
    for slot, contents in expected.items():
        found = copies.host(SLOT_GROUP, 1, copies.read(state, SLOT_GROUP, [slot]))
        require(_same(found, contents), f"SlotIO: slot {slot} has other contents")


def _addresses(target: Target) -> None:
    """Memory of the host that a tensor's address names holds the tensor."""
    lent = target.backend.offers(Addresses)
    if lent is None:
        return
    data: HostArray = wrap(np.arange(35, dtype=np.int32).reshape(5, 7))
    tensor = target.backend.tensor(data)
    memory = lent.memory(tensor)
    require(memory.address > 0, f"address of a tensor: found {memory.address}")
    if memory.device == "host":
        found = ctypes.string_at(memory.address, memory.nbytes)
        require(found == data.data.tobytes(), "the address of a tensor holds others")
