"""Sampling with penalties and filters: many chunks, ties across them, NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_place import INTERPRETED, IS_SLOW, PLACE

from inl.dtypes import rounded
from inl.ops import catalog
from inl.ops.attention import random_step
from inl.ops.sample import is_decided
from inl.ops.step import empty_tables
from inl.spec.op import Case
from inl.spec.step import INVALID_TOKEN, NEUTRAL, PARAMS
from inl.spec.tolerance import judge

# isort: split
from inl_torch import triton as ours
from inl_torch.triton.sampling import sample_filtered
from inl_torch.triton.sampling import sample_filtered_search as search
from inl_torch.triton.sampling.sample_likely import sample_likely
from inl_torch.triton.tuning import Tuning

VOCAB = 5000
MARGIN = 1e-5
TOP_K = (0, 1, 3, 40, 1500, VOCAB - 1, 2**24)
TOP_P = (1e-6, 0.3, 0.9, 0.999, 1.0)
MIN_P = (0.0, 0.0, 0.02, 0.3, 1.0)


def sampler_for(processors):
    """The kernel for a chip with ``processors`` multiprocessors."""
    tuning = Tuning(filters=True, processors=processors)
    return next(kernel for kernel in ours.kernels(tuning) if kernel.op == "sample")


SAMPLER = sampler_for(132)


def random_case(rng, tied):
    """Random logits [6, V], some with many ties, a step of six rows, and tables."""
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
        logits, step, tables = random_case(rng, tied)
        logits = logits.astype(np.float32).astype(np.float64)
        if is_decided([logits], step, tables, MARGIN, full=True):
            return Case(
                "sample_filtered",
                (logits, step, tables),
                {"sampler": "sample_filtered"},
            )


def without_filters(tables, temperature, **settings):
    """Give rows a temperature, and no penalty or filter except ``settings``."""
    tables.params[1:] = NEUTRAL
    for name, value in {"temperature": temperature, **settings}.items():
        tables.params[1:, PARAMS.index(name)] = value
    tables.token_counts[:], tables.bias[:] = 0, 0


def tokens_of(given, on_torch, choose=SAMPLER, sampler="sample_filtered"):
    """Sampled tokens of logits, a step and tables."""
    found = Case(sampler, given, {"sampler": sampler})
    arguments = on_torch(catalog()["sample"], found, "float32", PLACE)
    return choose.run(*arguments, sampler=sampler)[0].tolist()


EQUALS = [4, 900, 1030, 3000, 4999]
"""Ids in several chunks."""


def five_equals(parts, **settings):
    """Rows whose five most likely tokens, :data:`EQUALS`, are tied."""
    logits, step, tables = random_case(np.random.default_rng(1), tied=False)
    logits[:] = -50.0
    logits[:, EQUALS] = 2.0
    without_filters(tables, 1.0, **settings)
    return logits, step._replace(uniforms=parts.view(np.int32)), tables


class RandomLeft:
    """The kernel for the most likely tokens, of which random results are dropped."""

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            sample_likely[grid](*arguments, **options)
            params, slots, is_sampled, tokens = (arguments[n] for n in (5, 6, 7, 12))
            is_sampled[(params[slots.long(), 0] > 0) & (tokens >= 0)] = 0

        return launch


@pytest.fixture
def searched(monkeypatch):
    """Every row with a filter is sampled by the search."""
    monkeypatch.setattr(sample_filtered, "sample_likely", RandomLeft())


@pytest.fixture(params=["likely", "searched"])
def way(request):
    """Rows with few kept tokens sampled at once, and by the search as others are."""
    if request.param == "searched":
        request.getfixturevalue("searched")
    return request.param


def check_case(found, on_torch, on_host, choose=SAMPLER):
    spec = catalog()["sample"]
    arguments = on_torch(spec, found, "float32", PLACE)
    assert choose.refuse(*arguments, **found.attrs) is None
    spoiled = [torch.full((65536,), float("nan"), device=PLACE) for _ in range(8)]
    del spoiled
    return judge(spec, found, "float32", on_host(choose.run(*arguments, **found.attrs)))


@pytest.mark.parametrize("tied", [False, True])
def test_many_chunks(tied, seed, way, on_torch, on_host):
    rng = np.random.default_rng(seed)
    for _ in range(1 if IS_SLOW else 2):
        found = check_case(case(rng, tied), on_torch, on_host)
        assert found.passed, f"seed {seed}: {found}"


def test_ties_are_kept_by_ascending_id(way, on_torch):
    """Of five tied logits in different chunks, top-k keeps three; all are sampled."""
    parts = np.array([0.0, 0.4, 0.999, 0.999, 0.4, 0.0], np.float32)
    tokens = tokens_of(five_equals(parts, top_k=3), on_torch)
    assert tokens == [4, 900, 1030, 1030, 900, 4]


def test_neutral_parameters_sample_like_the_plain_sampler(seed, on_torch):
    rng = np.random.default_rng(seed)
    given = random_case(rng, tied=False)
    without_filters(given[2], 0.9)
    tokens = [
        tokens_of(given, on_torch, sampler=each)
        for each in ("sample", "sample_filtered")
    ]
    assert tokens[0] == tokens[1]


def near_chunk_boundaries(rng, mass):
    """Uniform numbers within rounding of the boundary of two chunks."""
    borders = np.append(np.cumsum(mass)[1023::1024] / mass.sum(), 1.0)
    steps = np.rint(rng.choice(borders, 6) * 2**24) + rng.integers(-6, 7, 6)
    return (np.clip(steps, 0, 2**24 - 1) / 2**24).astype(np.float32)


@pytest.mark.parametrize(
    ("sampler", "top_p", "number"),
    [("sample", 1.0, 1), ("sample", 1.0, 2), ("sample", 1.0, 4),
     ("sample_filtered", 0.9, 26), ("sample_filtered", 0.9, 48)],
)  # fmt: skip
def test_no_sample_falls_between_two_chunks(sampler, top_p, number, on_torch):
    """With these numbers, inconsistent sums once sampled tokens of mass 0."""
    rng = np.random.default_rng(number)
    row = 3 * rng.standard_normal(VOCAB).astype(np.float32)
    row[rng.random(VOCAB) < 0.95] = -1e30
    mass = np.exp(row.astype(np.float64) - row.max())
    order, before = np.argsort(-row, kind="stable"), np.empty(VOCAB)
    before[order] = np.cumsum(mass[order]) - mass[order]
    kept = (mass > 0) & (before < (top_p + MARGIN) * mass.sum())
    numbers = near_chunk_boundaries(rng, np.where(kept, mass, 0))
    _, step, tables = random_case(rng, tied=False)
    step = step._replace(uniforms=numbers.view(np.int32))
    without_filters(tables, 1.0, top_p=top_p)
    logits = np.tile(row.astype(np.float64), (6, 1))
    tokens = tokens_of((logits, step, tables), on_torch, sampler=sampler)
    assert kept[tokens].all()


# Both are of the interpreter.
@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce")
@pytest.mark.parametrize("sampler", ["greedy", "sample", "sample_filtered"])
@pytest.mark.parametrize("places", [(0, 1023), (1024, VOCAB - 1)])
def test_rows_without_finite_logits_give_no_token(on_torch, sampler, places):
    logits, step, tables = random_case(np.random.default_rng(2), tied=False)
    tables.params[1:, PARAMS.index("top_k")] = 3
    for row, at in enumerate(places):
        logits[row, at], logits[2 + row, at] = np.nan, np.inf
    logits[4] = -np.inf
    tokens = tokens_of((logits, step, tables), on_torch, sampler=sampler)
    assert tokens[:5] == 5 * [INVALID_TOKEN]
    assert 0 <= tokens[5] < VOCAB


def test_refused_on_chips_without_measurements():
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
"""Filters of the six rows of a step: greedy, none, one, both, all."""

MANY = VOCAB if IS_SLOW else 8500
"""Vocabulary of 5 or 9 chunks, the last partial."""
CHUNKS = -(-MANY // 1024)


def spread(rng):
    return 3 * rng.standard_normal((6, MANY))


def flat(rng):
    return 0.01 * rng.standard_normal((6, MANY))


def equal(_rng):
    return np.full((6, MANY), 1.5)


def one_possible(rng):
    """All tokens but one have probability 0."""
    logits = np.full((6, MANY), -np.inf)
    logits[np.arange(6), rng.integers(0, MANY, 6)] = 1.0
    return logits


def in_one_chunk(rng):
    """All tokens of positive mass are adjacent in one chunk."""
    logits = rng.uniform(-60, -50, (6, MANY))
    logits[:, 3072:4096] = rng.uniform(1.0, 1.2, (6, 1024))
    return logits


def in_few_chunks(rng):
    """A few high logits in two chunks, and the others slightly lower."""
    logits = rng.uniform(-1, 0, (6, MANY))
    logits[:, 1000:1050], logits[:, MANY - 10 :] = 4.0, rng.uniform(3, 4, (6, 10))
    return logits


def far_apart(rng):
    """Differences of all magnitudes, in each bin of the first window."""
    return -np.exp(rng.uniform(-70, 70, (6, MANY)))


def unambiguous(rng, make):
    """A step of :data:`SETTINGS` whose tokens do not depend on rounding."""
    while True:
        _, step, tables = random_case(rng, tied=False)
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


GROUPS = [
    (spread, 3), (equal, 3), (one_possible, 1), (in_few_chunks, 1), (far_apart, 3),
    (spread, 1), (flat, 3), (in_one_chunk, 3), (in_few_chunks, 3),
]  # fmt: skip


@pytest.mark.parametrize(("make", "processors"), GROUPS[:5] if IS_SLOW else GROUPS)
def test_groups_of_chunks(make, processors, seed, way, on_torch, on_host):
    """One program per row, or three programs of up to three chunks."""
    given = unambiguous(np.random.default_rng(seed), make)
    found = check_case(given, on_torch, on_host, sampler_for(processors))
    assert found.passed, f"seed {seed}: {found}"


@pytest.mark.parametrize(("share", "kept"), [(0.3, 1), (0.5, 2), (0.9, 3), (1.0, 3)])
def test_top_p_within_the_ties_that_top_k_keeps(share, kept, way, on_torch):
    """Of five tied logits top-k keeps three, and top-p the first of these."""
    parts = np.linspace(0.01, 0.99, 6, dtype=np.float32)
    given = five_equals(parts, top_k=3, top_p=share)
    tokens = tokens_of(given, on_torch, sampler_for(1))
    assert tokens == [EQUALS[int(part * kept)] for part in parts]


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter reads")
def test_only_chunks_with_keys_in_the_window_are_read(monkeypatch, searched, on_torch):
    read, plain = [], search.load_logits

    def load_logits(*arguments):
        *_, chunk, _, V, _, CHUNK = arguments
        read.append(int(chunk.handle.data.item()) * CHUNK < int(V.handle.data.item()))
        return plain(*arguments)

    monkeypatch.setattr(search, "load_logits", load_logits)
    tokens_of(
        unambiguous(np.random.default_rng(3), spread).args, on_torch, sampler_for(1)
    )
    # Six searches (two rows use both filters) of eight passes over all chunks.
    assert 6 * CHUNKS < sum(read) < 0.6 * 6 * 8 * CHUNKS, sum(read)


@triton.jit
def bins_of(keys, parts, starts, N: tl.constexpr):
    at = tl.arange(0, N)
    part = search._bin_of(tl.load(keys + at))
    tl.store(parts + at, part)
    tl.store(starts + at, search._bin_start(part))


def test_bins_of_the_first_window():
    """Each bin starts at its smallest key; the key before is in the previous bin."""
    inner = np.array([1, 1.5, 2, 3, 4, 6, 8, 12, 16], np.float32).view(np.int32)
    first = np.concatenate([np.arange(4) << 28, inner, np.arange(5, 8) << 28])
    keys = np.concatenate([first, np.append(first[1:], 1 << 31) - 1]).astype(np.int32)
    found = torch.empty(2, 32, dtype=torch.int32, device=PLACE)
    bins_of[(1,)](torch.from_numpy(keys).to(PLACE), *found, N=32)
    assert found[0].tolist() == 2 * list(range(16))
    assert found[1].tolist() == 2 * first.tolist()
    assert (keys[16:] - first < 2 ** np.where(np.isin(first, inner[:-1]), 22, 28)).all()


LIKELY = (
    {"top_k": 1}, {"top_k": 50, "top_p": 0.95}, {"top_k": 128, "min_p": 0.01},
    {"top_p": 0.4}, {"min_p": 0.5}, {"top_p": 0.9, "min_p": 0.2},
)  # fmt: skip
"""Filters of six rows of which :func:`peaked` logits are sampled at once."""


def peaked(rng, vocab):
    """Logits of which a few hundred, in any place, have nearly all of the mass."""
    logits = rng.uniform(-40, -30, (6, vocab))
    for row in logits:
        row[rng.choice(vocab, 100, replace=False)] = rng.uniform(0, 8, 100)
    return logits


@pytest.mark.parametrize("vocab", [900, 70_001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_tokens_are_sampled_without_a_search(
    dtype, vocab, seed, monkeypatch, on_torch, on_host
):
    """With a bias of some rows, and of a few tokens only in others."""
    marks, plain = [], sample_filtered.sample_likely

    class Watched:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                plain[grid](*arguments, **options)
                marks.append(arguments[7].tolist())

            return launch

    rng = np.random.default_rng(seed)
    while True:
        _, step, tables = random_case(rng, tied=False)
        step = step._replace(tokens=step.tokens % vocab)
        tables = tables._replace(
            token_counts=np.zeros((7, vocab), np.int32),
            bias=np.zeros((7, vocab), np.float32),
        )
        tables.params[1:] = NEUTRAL
        for slot, settings in zip(tables.params[1:], LIKELY, strict=True):
            for name, value in {"temperature": 0.8, **settings}.items():
                slot[PARAMS.index(name)] = value
        tables.bias[2], tables.bias[4, vocab // 2] = 0.25, 12.0
        logits = rounded(peaked(rng, vocab), dtype).astype(np.float64)
        if is_decided([logits], step, tables, MARGIN, full=True):
            break
    found = Case("likely", (logits, step, tables), {"sampler": "sample_filtered"})
    monkeypatch.setattr(sample_filtered, "sample_likely", Watched())
    spec = catalog()["sample"]
    arguments = on_torch(spec, found, dtype, PLACE)
    got = on_host(SAMPLER.run(*arguments, **found.attrs))
    verdict = judge(spec, found, dtype, got)
    assert verdict.passed, f"seed {seed}: {verdict}"
    assert marks == [[1] * 6]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("count", "vocab"), [(7, 5000), (3, 70_001), (2, 33)])
def test_scores(count, vocab, dtype, seed, on_torch, on_host):
    """Rows without a token, which have no scores, are not computed."""
    rng, spec = np.random.default_rng(seed), catalog()["score"]
    logits = 3 * rng.standard_normal((count, vocab))
    logits[0] = np.round(logits[0])
    tokens = rng.integers(0, vocab, count).astype(np.int32)
    found = Case("score", (logits, tokens))
    kernel = next(k for k in ours.kernels() if k.op == "score")
    arguments = on_torch(spec, found, dtype, PLACE)
    verdict = judge(spec, found, dtype, on_host(kernel.run(*arguments)))
    assert verdict.passed, f"seed {seed}: {verdict}"
    arguments[1][1:] = INVALID_TOKEN
    arguments[0][1:] = float("nan")
    first = on_host(kernel.run(*arguments))
    one = Case("score", (logits[:1], tokens[:1]))
    verdict = judge(spec, one, dtype, type(first)(*(part[:1] for part in first)))
    assert verdict.passed, f"seed {seed}: {verdict}"
