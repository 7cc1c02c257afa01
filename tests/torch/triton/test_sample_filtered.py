"""Penalties and filters without sorting: many chunks, ties across them, odd numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_place import INTERPRETED, PLACE

from inl.ops import catalog
from inl.ops.attention import random_step
from inl.ops.sample import is_decided
from inl.ops.step import empty_tables
from inl.spec.op import Case
from inl.spec.step import NEUTRAL, PARAMS
from inl.spec.tolerance import judge

# isort: split
from inl_torch import triton as ours
from inl_torch.triton.sampling import sample_filtered_search as search
from inl_torch.triton.tuning import Tuning

VOCAB = 5000
MARGIN = 1e-5
TOP_K = (0, 1, 3, 40, 1500, VOCAB - 1, 2**24)
TOP_P = (1e-6, 0.3, 0.9, 0.999, 1.0)
MIN_P = (0.0, 0.0, 0.02, 0.3, 1.0)


def chooser(processors):
    """The kernel for a chip of so many multiprocessors."""
    tuning = Tuning(filters=True, processors=processors)
    return next(kernel for kernel in ours.kernels(tuning) if kernel.op == "sample")


CHOOSE = chooser(132)


def drawn(rng, tied):
    """Logits [6, V], many of them equal or few, a step of six rows and their tables."""
    rows = 6
    step, _ = random_step(rng, [3] * rows, [1] * rows)
    uniforms = rng.random(rows, np.float32)
    tokens = rng.integers(0, VOCAB, step.tokens.shape).astype(np.int32)
    step = step._replace(uniforms=uniforms.view(np.int32), tokens=tokens)
    tables = empty_tables(groups=1, slots=rows + 1, max_blocks_per_seq=2, vocab=VOCAB)
    tables.params[1:] = NEUTRAL
    tables.params[1:, 0] = rng.choice(
        [0.0, 0.3, 1.0, 1.7], rows, p=[0.1, 0.3, 0.3, 0.3]
    )
    for name, values in (("top_k", TOP_K), ("top_p", TOP_P), ("min_p", MIN_P)):
        tables.params[1:, PARAMS.index(name)] = rng.choice(values, rows)
    if rng.random() < 0.5:
        tables.params[1:, 4:] = rng.uniform(0.5, 1.5, (rows, 3))
        tables.token_counts[1:] = rng.integers(0, 6, (rows, VOCAB))
        tables.bias[1:, ::7] = 1.5
    logits = 3 * rng.standard_normal((rows, VOCAB))
    return (np.round(2 * logits) / 2 if tied else logits), step, tables


def case(rng, tied):
    while True:
        logits, step, tables = drawn(rng, tied)
        logits = logits.astype(np.float32).astype(np.float64)
        if is_decided([logits], step, tables, MARGIN, full=True):
            return Case(
                "sample_filtered",
                (logits, step, tables),
                {"sampler": "sample_filtered"},
            )


def undisturbed(tables, temperature, **settings):
    """Let rows draw at a temperature, with no penalty or filter but ``settings``."""
    tables.params[1:] = NEUTRAL
    for name, value in {"temperature": temperature, **settings}.items():
        tables.params[1:, PARAMS.index(name)] = value
    tables.token_counts[:], tables.bias[:] = 0, 0


def tokens_of(given, on_torch, choose=CHOOSE, sampler="sample_filtered"):
    """What logits, a step and tables are given."""
    found = Case(sampler, given, {"sampler": sampler})
    arguments = on_torch(catalog()["sample"], found, "float32", PLACE)
    return choose.run(*arguments, sampler=sampler)[0].tolist()


EQUALS = [4, 900, 1030, 3000, 4999]
"""Ids in several chunks."""


def five_equals(parts, **settings):
    """Rows whose five likeliest tokens, :data:`EQUALS`, are equally so."""
    logits, step, tables = drawn(np.random.default_rng(1), tied=False)
    logits[:] = -50.0
    logits[:, EQUALS] = 2.0
    undisturbed(tables, 1.0, **settings)
    return logits, step._replace(uniforms=parts.view(np.int32)), tables


def verdict(found, on_torch, on_host, choose=CHOOSE):
    spec = catalog()["sample"]
    arguments = on_torch(spec, found, "float32", PLACE)
    assert choose.refuse(*arguments, **found.attrs) is None
    spoiled = [torch.full((65536,), float("nan"), device=PLACE) for _ in range(8)]
    del spoiled
    return judge(spec, found, "float32", on_host(choose.run(*arguments, **found.attrs)))


@pytest.mark.parametrize("tied", [False, True])
def test_full_over_many_chunks(tied, seed, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for _ in range(2):
        found = verdict(case(rng, tied), on_torch, on_host)
        assert found.passed, f"seed {seed}: {found}"


def test_ties_are_kept_by_rising_id(on_torch):
    """Of five equal logits, chunks apart, top-k keeps three; the draw takes each."""
    parts = np.array([0.0, 0.4, 0.999, 0.999, 0.4, 0.0], np.float32)
    tokens = tokens_of(five_equals(parts, top_k=3), on_torch)
    assert tokens == [4, 900, 1030, 1030, 900, 4]


def test_neutral_parameters_draw_as_draw_does(seed, on_torch):
    rng = np.random.default_rng(seed)
    given = drawn(rng, tied=False)
    undisturbed(given[2], 0.9)
    tokens = [
        tokens_of(given, on_torch, sampler=each)
        for each in ("sample", "sample_filtered")
    ]
    assert tokens[0] == tokens[1]


def beside_borders(rng, mass):
    """Uniform numbers that fall within rounding of the border of two chunks."""
    borders = np.append(np.cumsum(mass)[1023::1024] / mass.sum(), 1.0)
    steps = np.rint(rng.choice(borders, 6) * 2**24) + rng.integers(-6, 7, 6)
    return (np.clip(steps, 0, 2**24 - 1) / 2**24).astype(np.float32)


@pytest.mark.parametrize(
    ("sampler", "top_p", "number"),
    [("sample", 1.0, 1), ("sample", 1.0, 2), ("sample", 1.0, 4), ("sample_filtered", 0.9, 26),
     ("sample_filtered", 0.9, 48)],
)  # fmt: skip
def test_no_draw_falls_between_two_chunks(sampler, top_p, number, on_torch):
    """Of these numbers, sums in several orders drew ids that no mass belongs to."""
    rng = np.random.default_rng(number)
    row = 3 * rng.standard_normal(VOCAB).astype(np.float32)
    row[rng.random(VOCAB) < 0.95] = -1e30
    mass = np.exp(row.astype(np.float64) - row.max())
    order, before = np.argsort(-row, kind="stable"), np.empty(VOCAB)
    before[order] = np.cumsum(mass[order]) - mass[order]
    kept = (mass > 0) & (before < (top_p + MARGIN) * mass.sum())
    numbers = beside_borders(rng, np.where(kept, mass, 0))
    _, step, tables = drawn(rng, tied=False)
    step = step._replace(uniforms=numbers.view(np.int32))
    undisturbed(tables, 1.0, top_p=top_p)
    logits = np.tile(row.astype(np.float64), (6, 1))
    tokens = tokens_of((logits, step, tables), on_torch, sampler=sampler)
    assert kept[tokens].all()


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
def test_a_row_of_no_number_gives_an_id(on_torch):
    logits, step, tables = drawn(np.random.default_rng(2), tied=False)
    logits[0], logits[1] = np.nan, -np.inf
    tokens = tokens_of((logits, step, tables), on_torch)
    assert all(0 <= token < VOCAB for token in tokens)


def test_a_chip_where_it_was_not_measured_leaves_it_to_the_library():
    plain = next(k for k in ours.kernels(Tuning()) if k.op == "sample")
    logits = torch.zeros(1, 4)
    assert "not measured" in plain.refuse(logits, None, None, sampler="sample_filtered")
    assert plain.refuse(logits, None, None, sampler="sample") is None


SETTINGS = (
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 60},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 2000, "top_p": 0.93},
    {"temperature": 1.0, "top_k": 700, "top_p": 0.95, "min_p": 0.01},
)
"""Of the six rows of a step: greedy, filters off, one filter, both, all."""

MANY = 8500
"""Ids of 9 chunks, the last not whole."""


def spread(rng):
    return 3 * rng.standard_normal((6, MANY))


def flat(rng):
    return 0.01 * rng.standard_normal((6, MANY))


def equal(_rng):
    return np.full((6, MANY), 1.5)


def alone(rng):
    """All but one are impossible."""
    logits = np.full((6, MANY), -np.inf)
    logits[np.arange(6), rng.integers(0, MANY, 6)] = 1.0
    return logits


def in_one_chunk(rng):
    """All that may be drawn is in one chunk, close together."""
    logits = rng.uniform(-60, -50, (6, MANY))
    logits[:, 7168:8192] = rng.uniform(1.0, 1.2, (6, 1024))
    return logits


def in_few_chunks(rng):
    """A few high ones in two chunks, and the others only little below."""
    logits = rng.uniform(-1, 0, (6, MANY))
    logits[:, 1000:1050], logits[:, MANY - 10 :] = 4.0, rng.uniform(3, 4, (6, 10))
    return logits


def far_apart(rng):
    """Gaps of every size that a float has, in each part of the first window."""
    return -np.exp(rng.uniform(-70, 70, (6, MANY)))


def decided(rng, make):
    """A step of :data:`SETTINGS` whose tokens rounding leaves alone."""
    while True:
        _, step, tables = drawn(rng, tied=False)
        tables = tables._replace(
            token_counts=np.zeros((7, MANY), np.int32),
            bias=np.zeros((7, MANY), np.float32),
        )
        tables.params[1:] = NEUTRAL
        for slot, settings in zip(tables.params[1:], SETTINGS, strict=True):
            for name, value in settings.items():
                slot[PARAMS.index(name)] = value
        logits = make(rng).astype(np.float32).astype(np.float64)
        if is_decided([logits], step, tables, MARGIN, full=True):
            return Case(
                make.__name__, (logits, step, tables), {"sampler": "sample_filtered"}
            )


@pytest.mark.parametrize(
    ("make", "processors"),
    [(spread, 1), (spread, 3), (flat, 3), (equal, 3), (alone, 1), (in_one_chunk, 3),
     (in_few_chunks, 1), (in_few_chunks, 3), (far_apart, 3)],
)  # fmt: skip
def test_groups_of_chunks(make, processors, seed, on_torch, on_host):
    """One program for a row, or three of three chunks."""
    given = decided(np.random.default_rng(seed), make)
    found = verdict(given, on_torch, on_host, chooser(processors))
    assert found.passed, f"seed {seed}: {found}"


@pytest.mark.parametrize(("share", "kept"), [(0.3, 1), (0.5, 2), (0.9, 3), (1.0, 3)])
def test_top_p_ends_among_those_that_top_k_keeps_of_equals(share, kept, on_torch):
    """Of five equal logits top-k keeps three, and top-p the first of those."""
    parts = np.linspace(0.01, 0.99, 6, dtype=np.float32)
    given = five_equals(parts, top_k=3, top_p=share)
    tokens = tokens_of(given, on_torch, chooser(1))
    assert tokens == [EQUALS[int(part * kept)] for part in parts]


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter reads")
def test_only_chunks_where_the_search_goes_on_are_read(monkeypatch, on_torch):
    read, plain = [], search.load_logits

    def load_logits(penalized, sample, chunk, V, CHUNK):
        read.append(int(chunk.handle.data.item()) * CHUNK < int(V.handle.data.item()))
        return plain(changed, sample, chunk, V, CHUNK)

    monkeypatch.setattr(search, "load_logits", load_logits)
    tokens_of(decided(np.random.default_rng(3), spread).args, on_torch, chooser(1))
    # Six searches, two of the rows do both: eight passes of each would read all.
    assert 6 * 9 < sum(read) < 0.6 * 6 * 8 * 9, sum(read)


@triton.jit
def places(keys, parts, starts, N: tl.constexpr):
    at = tl.arange(0, N)
    part = search._bin_of(tl.load(keys + at))
    tl.store(parts + at, part)
    tl.store(starts + at, search._bin_start(part))


def test_parts_of_the_first_window():
    """Each begins where it should, its first key and the last before it told apart."""
    inner = np.array([1, 1.5, 2, 3, 4, 6, 8, 12, 16], np.float32).view(np.int32)
    first = np.concatenate([np.arange(4) << 28, inner, np.arange(5, 8) << 28])
    keys = np.concatenate([first, np.append(first[1:], 1 << 31) - 1]).astype(np.int32)
    found = torch.empty(2, 32, dtype=torch.int32, device=PLACE)
    places[(1,)](torch.from_numpy(keys).to(PLACE), *found, N=32)
    assert found[0].tolist() == 2 * list(range(16))
    assert found[1].tolist() == 2 * first.tolist()
    assert (keys[16:] - first < 2 ** np.where(np.isin(first, inner[:-1]), 22, 28)).all()
