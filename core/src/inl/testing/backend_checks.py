"""Checks of a backend: plugin, traits, tensors, state, memory and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.base import CacheBytes
from inl.backend.programs import compile_program, info_of
from inl.dtypes import FLOATS, HostArray, cast, widen, wrap
from inl.errors import InlError
from inl.ops import catalog, unknown_op
from inl.ops.step import admit, empty_tables
from inl.plugin import registry
from inl.scheduling.buckets import Buckets
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.dispatch import ResolvedOps, Tracer
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.message import admit_frame, admit_size
from inl.spec.step import SAMPLERS, Bucket, Tables
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves, tree_map
from inl.testing.capability_checks import capability_checks
from inl.testing.check import Check, CheckFailed, equal, require

if TYPE_CHECKING:
    from inl.testing.target import Target

SHAPES = ((), (1,), (0,), (3,), (5, 7), (2, 0, 3), (1, 1, 1, 4), (17, 3, 2), (1025,))
LIMITS = (
    Limits(
        slots=2,
        blocks=(3,),
        block_size=16,
        max_blocks_per_seq=2,
        vocab=5,
        sampler="greedy",
    ),
    Limits(slots=9, blocks=(65,), block_size=16, max_blocks_per_seq=32, vocab=97),
    Limits(
        slots=65,
        blocks=(513, 513),
        block_size=8,
        max_blocks_per_seq=64,
        vocab=1000,
        sampler="sample",
    ),
)

LONG = (1 << 20) + 3
"""Numbers of an array of some MB, no multiple of a buffer; float32 holds them all."""
ADMISSIONS = 16
"""Admissions of a call that has several: the contract says 1 or 16."""


class Unknown:
    """Capability that no backend has."""


def backend_checks(target: Target) -> Iterator[Check]:
    """Check everything but kernels, runner and engine."""
    checks: dict[str, Callable[[Target], None]] = {
        "plugin": _plugin,
        "traits": _traits,
        "kernels": _kernels,
        "memory": _memory,
        "offers": _offers,
        "buckets": _buckets,
        "compile": _compile,
        "tensor/copies": _copies,
    }
    for name, run in checks.items():
        yield Check("backend", f"backend/{name}", partial(run, target))
    for dtype in dict.fromkeys([*target.dtypes, "float32", "int32"]):
        run_dtype = partial(_round_trip, target, dtype)
        yield Check("backend", f"backend/tensor/{dtype}", run_dtype)
    for dtype in target.dtypes:
        yield Check("backend", f"backend/state/{dtype}", partial(_state, target, dtype))
    if (layout := target.backend.offers(CacheBytes)) is not None:
        for dtype in (*target.dtypes, *target.backend.traits.kv_dtypes):
            run_layout = partial(_layout, target, layout, dtype)
            yield Check("backend", f"backend/layout/{dtype}", run_layout)
    yield from capability_checks(target)


def _plugin(target: Target) -> None:
    known, kind = registry(), target.device.type
    entry = known.backend(kind)
    if entry is None:
        raise CheckFailed(f"no plugin registers {kind}; {known.advice(kind)}")
    equal(
        f"reason why {target.device} is unavailable", known.why_not(target.device), None
    )
    equal("device of the backend", target.backend.device, target.device)
    for row in known.plugins:
        if row.name == entry.origin.name and row.distribution == (
            entry.origin.distribution
        ):
            equal(f"status of plugin {row.name} ({row.detail})", row.status, "ready")


def _traits(target: Target) -> None:
    traits = target.backend.traits
    require(
        len(traits.dtypes) > 0 and set(traits.dtypes) <= set(FLOATS),
        f"traits.dtypes: found {traits.dtypes}, accepted: one or more of {FLOATS}",
    )
    for name in ("block_size", "depth"):
        value = getattr(traits, name)
        require(
            type(value) is int and value >= 1,
            f"traits.{name}: found {value!r}, accepted: a whole number from 1",
        )


def _kernels(target: Target) -> None:
    labels: set[str] = set()
    for kernel in target.selection.kernels:
        require(
            isinstance(kernel, Kernel), f"kernels: found {kernel!r}, accepted: a Kernel"
        )
        require(
            kernel.op in catalog(),
            f"kernel {kernel.label}: {unknown_op(kernel.op)}",
        )
        require(kernel.label not in labels, f"kernel {kernel.label}: listed twice")
        labels.add(kernel.label)
    own = [sorted(k.label for k in target.backend.kernels()) for _ in range(2)]
    require(
        own[0] == own[1] != [] and set(own[0]) <= labels,
        f"kernels: found {len(own[0])}, then {len(own[1])} in another call; each call "
        "lists all of them, since every model asks",
    )


def _memory(target: Target) -> None:
    memory = target.backend.memory()
    require(
        0 < memory.total < 1 << 60 and 0 <= memory.free <= memory.total,
        f"memory: found {memory}, expected bytes with 0 <= free <= total",
    )


def _offers(target: Target) -> None:
    equal("offers(an unknown kind)", target.backend.offers(Unknown), None)


def _buckets(target: Target) -> None:
    for limits in LIMITS:
        buckets = list(target.backend.buckets(limits))
        for bucket in buckets:
            valid = isinstance(bucket, Bucket) and bucket.sampler in SAMPLERS
            require(
                valid and min(bucket[:3]) >= 1,
                f"buckets: found {bucket!r}, accepted: Bucket(tokens, rows, "
                f"tokens_per_row, sampler), sizes from 1, sampler one of {SAMPLERS}",
            )
        sizes = [bucket.tokens for bucket in buckets]
        equal("buckets: tokens, in ascending order", sizes, sorted(sizes))
        equal("buckets: number of distinct ones", len(set(buckets)), len(buckets))
        if not buckets:
            continue
        complete = replace(limits, buckets=tuple(buckets))
        try:
            scheduled = Buckets(complete, token_budget=512, max_rows=limits.slots - 1)
        except InlError as error:
            raise CheckFailed(f"buckets for {limits}: {error}") from error
        equal(f"most general sampler for {limits}", scheduled.sampler, limits.sampler)


def _compile(target: Target) -> None:
    """A program consumes its state and returns it updated, call after call."""
    backend, groups, width = target.backend, 1, 4
    tables = empty_tables(groups=groups, slots=5, max_blocks_per_seq=width)
    frames = [
        admit_frame(
            slot,
            [[slot, 9]],
            groups=groups,
            max_blocks_per_seq=width,
            length=slot,
            last=2,
        )
        for slot in (1, 4, 2, 3)
    ]
    tracer = Tracer(target.selection, Bucket(tokens=1, rows=1), 4)
    words = StrictArray((1, admit_size(groups, width)), "int32")
    strict = tree_map(lambda x: StrictArray(x.shape, x.dtype.name), tables)
    tracer.admit(words, strict)
    ops = ResolvedOps(tracer)

    def run(messages: Any, state: Any) -> tuple[Any]:
        return (state._replace(tables=ops.admit(messages, state.tables)),)

    limits = Limits(
        slots=5, blocks=(40,), block_size=4, max_blocks_per_seq=width, vocab=5
    )
    program = compile_program(backend, run, info_of("admit", None, limits))
    device_tables = Tables(*(backend.tensor(wrap(array)) for array in tables))
    state = State(caches=(), slotted={}, tables=device_tables)
    # One admission per call, then as many as a call has, with padding between them.
    padded = np.zeros((ADMISSIONS, *frames[0].shape), np.int32)
    padded[0], padded[2] = frames[2:]
    for batch in (frames[0][None], frames[1][None], padded):
        tables = admit.body(batch, tables)
        (state,) = program(backend.tensor(wrap(batch)), state)
    for name, actual, want in zip(Tables._fields, state.tables, tables, strict=True):
        same = np.array_equal(widen(backend.numpy(actual)), want)
        require(same, f"compiled admit: after 3 calls {name} differ from the op body")


def _copies(target: Target) -> None:
    """A tensor is a copy of the host array, which may be strided."""
    for dtype in ("float32", "int32"):
        host = np.arange(12).astype(dtype).reshape(3, 4)
        tensor = target.backend.tensor(wrap(host))
        host[:] = 99
        same = np.array_equal(_fetch(target, tensor), np.arange(12).reshape(3, 4))
        require(same, f"tensor of {dtype}: shares memory with the host array; copy it")
        strided = np.arange(24).astype(dtype).reshape(4, 6)[::2, ::3]
        copied = _fetch(target, target.backend.tensor(wrap(strided)))
        same = np.array_equal(copied, strided)
        require(same, f"tensor of {dtype}: wrong values from a strided array")
        several = [np.full((3, 5), n).astype(dtype) for n in range(4)]
        tensors = [target.backend.tensor(wrap(each)) for each in several]
        fetched = [_fetch(target, each) for each in tensors]
        for each, found in zip(several, fetched, strict=True):
            require(
                np.array_equal(found, each),
                f"tensor and numpy of {dtype}: one of four arrays of a shape has the "
                "values of another; look for a buffer that copies share",
            )
        long = np.arange(LONG).astype(dtype)
        require(
            np.array_equal(_fetch(target, target.backend.tensor(wrap(long))), long),
            f"tensor and numpy of {dtype}: wrong values from {LONG:,} numbers",
        )


def _round_trip(target: Target, dtype: str) -> None:
    backend = target.backend
    for shape in SHAPES:
        rng = target.rng(dtype, shape)
        host = _values(rng, shape, dtype)
        result = backend.numpy(backend.tensor(host))
        equal(f"{dtype}{list(shape)}: shape after a round trip", result.shape, shape)
        if not np.array_equal(widen(result), widen(host), equal_nan=dtype in FLOATS):
            raise CheckFailed(
                f"{dtype}{list(shape)}: values changed in a round trip "
                f"(returned dtype {result.dtype})"
            )


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> HostArray:
    if dtype not in FLOATS:
        bounds = np.iinfo(dtype)
        low, high = int(bounds.min), int(bounds.max)
        return wrap(rng.integers(low, high, shape, dtype, endpoint=True))
    values = np.asarray(10.0 ** rng.uniform(-4, 4, shape) * rng.choice([-1, 1], shape))
    specials = np.inf, -np.inf, np.nan, 0.0, 1.0, 1e-30, -3e38
    for index, special in enumerate(specials):
        if values.size > 8:
            values.flat[index] = special
    return cast(values, dtype)


def _state(target: Target, dtype: str) -> None:
    limits = Limits(
        slots=4,
        blocks=(7, 5),
        block_size=target.backend.traits.block_size,
        max_blocks_per_seq=3,
        vocab=11,
    )
    spec = (
        Paged((0, 2), 2, 16, dtype),
        Paged((1,), 1, 32, dtype, 8),
        Slotted("velocity", (3, 2), "float32", "replay"),
    )
    state = target.backend.state(spec, limits=limits)
    equal("state: number of caches (one per layer)", len(state.caches), 3)
    for layer, cache in enumerate(state.caches):
        if isinstance(cache, Cache):
            group, blocks = (spec[1], 5) if layer == 1 else (spec[0], 7)
            shape = (blocks, limits.block_size, group.kv_heads, group.head_dim)
            shapes = [tuple(part.shape) for part in (cache.k, cache.v)]
            equal(f"state: shapes of cache {layer}", shapes, [shape, shape])
    slotted = {key: tuple(x.shape) for key, x in state.slotted.items()}
    equal("state: shapes of slotted state", slotted, {"velocity": (4, 3, 2)})
    tables = empty_tables(groups=2, slots=4, max_blocks_per_seq=3, vocab=11)
    for name, got, want in zip(Tables._fields, state.tables, tables, strict=True):
        equal(f"state: shape of {name}", tuple(got.shape), want.shape)
    zero = all(not _fetch(target, leaf).any() for leaf in leaves(state))
    require(zero, "state: found nonzero values, expected zeros")


def _layout(target: Target, layout: CacheBytes, dtype: str) -> None:
    """More blocks take as much more memory as ``CacheBytes`` says."""
    size = target.backend.traits.block_size
    group = Paged((0,), 3, 24, dtype)
    stated = layout.block_bytes(group, size)
    require(
        type(stated) is int and stated > 0,
        f"CacheBytes.block_bytes({dtype}): found {stated!r}, accepted: bytes, from 1",
    )
    taken = []
    for blocks in (5, 9):
        limits = Limits(
            slots=2, blocks=(blocks,), block_size=size, max_blocks_per_seq=2, vocab=5
        )
        caches = target.backend.state((group,), limits=limits).caches
        sizes = [getattr(leaf, "nbytes", None) for leaf in leaves(caches)]
        known = [each for each in sizes if type(each) is int]
        if len(known) < len(sizes):
            return  # tensors without a size in bytes
        taken.append(sum(known))
    found = (taken[1] - taken[0]) / 4
    require(
        found == stated,
        f"CacheBytes.block_bytes({dtype}): found {stated}, a block of {size} tokens "
        f"with 3 heads of 24 takes {found:g} bytes",
    )


def _fetch(target: Target, x: Any) -> Any:
    return widen(target.backend.numpy(x))
