"""Cases at the edges of sizes and of values that models in use reach.

Each has several sizes at once, and one axis each that is large: kernels that are right
for small ones have another path there, or a number that is too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from inl.ops.attention import attention_case, random_step
from inl.ops.embedding import Embedding
from inl.ops.full_attention import starts_of
from inl.ops.group_route import ExpertBias
from inl.ops.moe import ExpertLinear
from inl.ops.norm import Norm
from inl.ops.recurrent import Decay, Taps
from inl.ops.rope import RopeScaling
from inl.ops.sample_cases import decided
from inl.ops.sink_attention import Sinks
from inl.ops.span_attention import token_spans
from inl.ops.step import empty_tables
from inl.ops.verify import verify_step
from inl.spec.cache import Cache
from inl.spec.message import BlockTableUpdate, Row, admit_frame, step_frame
from inl.spec.op import Case, OpSpec
from inl.spec.step import NEUTRAL, PARAMS, Bucket, Step, Tables

Rng = np.random.Generator

VOCAB: Final = 70_001
"""Above 65,535, the largest number of 16 bits."""
ADMISSIONS: Final = 16
"""Most admissions of a call."""
WIDE: Final = 5003
"""More columns than a sort in a block's memory holds."""
BLOCK: Final = 2003
"""More columns than a block of threads has."""
BANNED: Final = -1e30
"""What :data:`~inl.ops.sample.mask_logits` leaves of a masked logit."""
TAIL: Final = 1030
"""Columns or lanes beyond 1,024, and no multiple of a vector."""


def edge_cases(op: OpSpec, rng: Rng, block_size: int) -> Iterator[Case]:
    """Yield cases of ``op``; block_size: tokens of a cache block of the backend."""
    if op.name in CACHED:
        yield from CACHED[op.name](rng, block_size)
    if op.name in EDGES:
        yield from EDGES[op.name](rng)


def _attention(rng: Rng, block_size: int) -> Iterator[Case]:
    for heads, attrs in (
        ((96, 8, 192), {}),
        ((4, 1, 256), {"scale": 0.1, "window": 5, "cap": 4.0}),
        ((4, 2, 128), {"scale": 0.05, "window": 4}),
    ):
        case = attention_case(rng, "mixed", heads, attrs)
        yield replace(case, name=f"edges/{case.name}")
    for name, cached, counts in (
        ("prompt 1100", [0], [1100]), ("context 9000", [8999], [1]),
        ("rows 300", [5, 70] * 150, [1] * 300),
    ):  # fmt: skip
        yield _over(rng, name, random_step(rng, cached, counts))
    yield _loud(rng)
    if block_size != 4:
        name, given = f"blocks of {block_size}", ([3, 40, 0], [1, 1, 21])
        yield _over(rng, name, random_step(rng, *given, block_size=block_size),
                    block_size)  # fmt: skip


def _over(rng: Rng, name: str, made: tuple[Step, int], size: int = 4) -> Case:
    step, blocks = made
    q = rng.standard_normal((step.tokens.shape[0], 2, 16))
    cache = Cache(*rng.standard_normal((2, blocks, size, 1, 16)))
    attrs = {"scale": 0.25, "window": None, "cap": None, "group": 0}
    return Case(f"edges/{name}", (q, cache, step), attrs)


def _loud(rng: Rng) -> Case:
    """Scores far beyond 88, where exp overflows, and far below -10,000.

    All are exact in every dtype: whole numbers times powers of two.
    """
    case = attention_case(rng, "mixed", (4, 2, 16), {"scale": 0.25})
    q, cache, step = case.args
    signs = rng.choice([-1.0, 1.0], (2, 16))
    sizes = rng.integers(1, 9, (*cache.k.shape[:3], 1))
    q = rng.choice([-4096.0, 4096.0], (len(q), 4, 1)) * signs.repeat(2, 0)
    args = q, cache._replace(k=sizes * signs), step
    return replace(case, name="edges/scores of 100,000", args=args)


def _sink_attention(rng: Rng, block_size: int) -> Iterator[Case]:
    for case in _attention(rng, block_size):
        if case.attrs["cap"] is None:
            attrs = {key: x for key, x in case.attrs.items() if key != "cap"}
            w = Sinks(rng.standard_normal(case.args[0].shape[1]))
            yield replace(case, args=(*case.args, w), attrs=attrs)


def _span_attention(rng: Rng, _block_size: int) -> Iterator[Case]:
    step, blocks = random_step(rng, [7, 0], [400, 3])
    case = _over(rng, "span of 380", (step, blocks))
    yield replace(case, args=(*case.args, token_spans(step, [(0, 20, 400)])))


def _write_kv(rng: Rng, block_size: int) -> Iterator[Case]:
    k, v = rng.standard_normal((2, 1100, 1, 8))
    cache = Cache(*np.zeros((2, 300, 4, 1, 8)))
    cells = rng.permutation(np.arange(4, 1200))[:1100].astype(np.int32)
    yield Case("edges/1100 rows", (k, v, cache, cells))
    if block_size != 4:
        k, v = rng.standard_normal((2, 19, 20, 256))
        cache = Cache(*np.zeros((2, 4, block_size, 20, 256)))
        cells = rng.permutation(np.arange(block_size, 4 * block_size))
        args = k, v, cache, np.resize(cells, 19).astype(np.int32)
        if len(cells) >= len(k):
            yield Case(f"edges/blocks of {block_size}", args)


CACHED: Final[Mapping[str, Callable[[Rng, int], Iterator[Case]]]] = {
    "attention": _attention,
    "sink_attention": _sink_attention,
    "span_attention": _span_attention,
    "write_kv": _write_kv,
}
"""Ops that read or write the cache."""


def _full_attention(rng: Rng) -> Iterator[Case]:
    lengths = 5, 500, 1
    q, k, v = rng.standard_normal((3, sum(lengths), 2, 8))
    attrs = {"scale": 0.3, "window": None}
    yield Case("edges/500 tokens", (q, k, v, starts_of(lengths)), attrs)


def _pool(rng: Rng) -> Iterator[Case]:
    lengths = [3, 0, 1, 2] * 20
    x = rng.standard_normal((sum(lengths), 4))
    for kind in ("mean", "last"):
        args = x, starts_of(lengths)
        yield Case(f"edges/{kind}/80 sequences", args, {"kind": kind})


def _rope_table(_rng: Rng) -> Iterator[Case]:
    positions = np.array([4000, 65_541, 131_075, 200_003], np.int32)
    for dim, theta, scaling in (
        (64, 5e5, RopeScaling("llama3", 32.0, 0.5, 8.0, 4096)),
        (128, 1e6, RopeScaling("yarn", 4.0, 1.0, 32.0, 32_768, gain=1.1386)),
        (96, 1e4, RopeScaling("linear", 2.5)),
        (64, 1e4, RopeScaling(rotary_dim=32)),
    ):
        attrs = {"dim": dim, "theta": theta, "scaling": scaling}
        yield Case(f"edges/{scaling.kind}/{dim}", (positions,), attrs)


def _rms_norm(rng: Rng) -> Iterator[Case]:
    """Yield rows whose squares are too large for float16."""
    x = 1e4 * rng.uniform(-3, 3, (3, 320))
    yield Case("edges/3x320/10000", (x, Norm(rng.standard_normal(320))), {"eps": 1e-6})


def _unit_rows(rng: Rng) -> Iterator[Case]:
    yield Case("edges/3x40/1e-06", (1e-6 * rng.standard_normal((3, 40)),))


def _gated_activation(rng: Rng) -> Iterator[Case]:
    gate = np.array([[-3e4, -400.0, -30.0, 0.0, 30.0, 400.0, 3e4]])
    args = gate, rng.uniform(0.1, 1, gate.shape)
    for activation in ("silu", "gelu_tanh"):
        yield Case(f"edges/{activation}", args, {"activation": activation})


def _embedding(rng: Rng) -> Iterator[Case]:
    ids, weight = np.array([39, 0, 7], np.int32), rng.standard_normal((40, 5123))
    yield Case("edges/3x40x5123", (ids, Embedding(weight)))


def _uniforms(step: Step, *uniforms: float) -> Step:
    return step._replace(uniforms=np.array(uniforms, np.float32).view(np.int32))


def _sample(rng: Rng) -> Iterator[Case]:
    yield from _end_uniforms(rng)
    yield from _far_ties(rng)
    yield from _wide_filters(rng)
    # Steps that sample several tokens of each row, one uniform number each.
    step, _ = random_step(rng, [3, 0], [1, 6])
    step = _uniforms(step._replace(samples=np.array([0, 0, 5, 6], np.int32)),
                     0.9, 0.1, 0.4, 0.7)  # fmt: skip
    tables = empty_tables(groups=1, slots=3, max_blocks_per_seq=9, vocab=0)
    tables.params[1:] = NEUTRAL
    tables.params[1:, 0] = [1.0, 0.5]
    logits = np.log(np.array([[5, 2, 2, 1.0]] * 4))
    logits = np.round(8 * logits) / 8
    yield Case("edges/2 samples of a row", (logits, step, tables),
               {"sampler": "sample"})  # fmt: skip


def _end_uniforms(rng: Rng) -> Iterator[Case]:
    """Yield the least and the largest uniform number, beside ids that are banned."""
    step, _ = random_step(rng, [3, 5], [1, 1])
    step = _uniforms(step, 0.0, 1 - 2.0**-24)
    tables = empty_tables(groups=1, slots=3, max_blocks_per_seq=3, vocab=BLOCK)
    tables.params[1:] = NEUTRAL
    tables.params[1:, 0] = 1.0
    logits = rng.standard_normal((2, BLOCK))
    logits[:, :40] = logits[:, -40:] = BANNED
    logits[:, [40, BLOCK - 41]] = 12.0
    for sampler in ("sample", "sample_filtered"):
        args = logits, step, tables
        yield Case(f"edges/{sampler}/uniforms 0 and 1", args, {"sampler": sampler})


def _far_ties(rng: Rng) -> Iterator[Case]:
    """Yield equal logits in different blocks of columns, and a bias of a large id."""
    step, _ = random_step(rng, [3, 5], [1, 1])
    tables = empty_tables(groups=1, slots=3, max_blocks_per_seq=3, vocab=VOCAB)
    tables.params[1:] = NEUTRAL
    tables.params[1:, 0] = 0.0
    tables.bias[2, 66_000] = 60.0
    logits = rng.standard_normal((2, VOCAB))
    logits[:, [300, 1500, 40_000, VOCAB - 1]] = 9.0
    for sampler in ("greedy", "sample_filtered"):
        args = logits, step, tables
        yield Case(f"edges/{sampler}/far ties", args, {"sampler": sampler})


def _wide_filters(rng: Rng) -> Iterator[Case]:
    """Yield many candidates of top-k and top-p, and counts of more than 8 bits."""
    rows = 6
    step, _ = random_step(rng, [3] * rows, [1] * rows)
    at = {name: index for index, name in enumerate(PARAMS)}

    def make() -> Case:
        tables = empty_tables(
            groups=1, slots=rows + 1, max_blocks_per_seq=3, vocab=WIDE
        )
        tables.params[1:] = NEUTRAL
        tables.params[1:, at["temperature"]] = 1.5
        tables.params[1::2, at["top_k"]] = 3000
        tables.params[2::2, at["top_p"]] = 0.9
        tables.params[1:, at["frequency_penalty"]] = 0.01
        tables.token_counts[1:] = rng.choice([0, 1, 600, 80_001], (rows, WIDE))
        # Exact in every dtype, so that the tokens are the same.
        logits = np.round(16 * rng.standard_normal((rows, WIDE)).clip(-3, 3)) / 16
        args = logits, _uniforms(step, *rng.uniform(0.1, 0.9, rows)), tables
        return Case("edges/sample_filtered/many", args, {"sampler": "sample_filtered"})

    yield decided(make)


def _score(rng: Rng) -> Iterator[Case]:
    """Yield logits whose exponentials overflow, with ties in many blocks of columns."""
    logits = 200 + np.round(2 * rng.standard_normal((2, BLOCK))).clip(max=4)
    yield Case("edges/ties at 200", (logits, np.array([3, BLOCK - 1], np.int32)))


def _mask_logits(rng: Rng) -> Iterator[Case]:
    words = rng.integers(-(2**31), 2**31, (2, 128)).astype(np.int32)
    yield Case("edges/2x4096", (rng.standard_normal((2, 4096)), words))


def _make_step(rng: Rng) -> Iterator[Case]:
    """Yield three cache groups, with updates of each, and more than 1,024 tokens."""
    groups, width, size = 3, 300, 4
    tables = empty_tables(groups=groups, slots=4, max_blocks_per_seq=width, vocab=0)
    tables.blocks[:, 1:] = rng.integers(1, 999, (groups, 3, width))
    tables.lengths[1:] = [5, 0, 9]
    tables.adapters[1:] = [3, 33, 1]
    ids = [int(x) for x in rng.integers(0, 90, TAIL)]
    rows = [Row(1, [-1], [0.25]), Row(3, [-1], [0.5]), Row(2, ids, [0.75])]
    updates = [BlockTableUpdate(group, 2, 2 + group, 17) for group in range(groups)]
    bucket = Bucket(tokens=TAIL + 9, rows=4)
    message = step_frame(
        bucket, rows, updates, step=3, groups=groups, block_size=size, decode_rows=2
    )
    attrs = {"bucket": bucket, "block_size": size}
    yield Case(f"edges/3 groups, {TAIL} tokens", (message, tables), attrs)


def _prune_last_layer(rng: Rng) -> Iterator[Case]:
    """Yield many rows, with tokens and the cache positions of two groups."""
    step, _ = random_step(rng, [2, 9] * 70 + [0], [1] * 140 + [300])
    ids = rng.integers(0, VOCAB, step.tokens.shape).astype(np.int32)
    writes = np.concatenate([step.writes, step.writes[:, ::-1]])
    step = step._replace(tokens=ids, writes=writes, blocks=step.blocks.repeat(2, 0))
    yield Case("edges/141 rows, 2 groups", (step,))


def _admit(rng: Rng) -> Iterator[Case]:
    """Yield as many admissions as a call has, each to a slot that was in use."""
    tables = empty_tables(groups=2, slots=20, max_blocks_per_seq=3, vocab=9)
    tables = Tables(*(rng.integers(1, 9, x.shape).astype(x.dtype) for x in tables))
    frames = [
        admit_frame(
            int(slot), [[number + 1, 2], [3, number + 4]], groups=2,
            max_blocks_per_seq=3, length=number, last=7, adapter=number, top_p=0.5,
        )
        for number, slot in enumerate(rng.permutation(np.arange(1, 20))[:ADMISSIONS])
    ]  # fmt: skip
    yield Case(f"edges/{ADMISSIONS} admissions", (np.stack(frames), tables))


def _many_ids(rng: Rng, width: int) -> tuple[Step, Any]:
    """Return a step that verifies drafts, whose ids have 17 bits."""
    step, tables = verify_step(
        rng, vocab=VOCAB, rows=[(slot, width) for slot in range(1, 6)]
    )
    return step._replace(tokens=(6900 * step.tokens).astype(np.int32)), tables


def _verify(rng: Rng) -> Iterator[Case]:
    step, tables = _many_ids(rng, 4)
    tokens = np.append(step.tokens[1:], 7).astype(np.int32)
    tokens[[1, 9]] = 3
    yield Case(f"edges/vocabulary {VOCAB}", (tokens, step, tables), {"width": 4})
    slots = 300
    step, tables = verify_step(
        rng, slots=slots, vocab=0, rows=[(slot, 2) for slot in range(1, slots)]
    )
    tokens = np.append(step.tokens[1:], 7).astype(np.int32)
    tokens[::3] = 3
    yield Case(f"edges/{slots - 1} rows", (tokens, step, tables), {"width": 2})


def _expand_rows(rng: Rng) -> Iterator[Case]:
    yield Case(f"edges/vocabulary {VOCAB}", _many_ids(rng, 3))


def _route(rng: Rng) -> Iterator[Case]:
    """Yield large logits, many of which are equal."""
    logits = 100 + np.round(2 * rng.standard_normal((5, 128)))
    for kind in ("softmax_topk", "topk_softmax"):
        attrs = {"k": 8, "kind": kind, "renormalize": False}
        yield Case(f"edges/5x128x8/{kind}", (logits,), attrs)


def _group_route(rng: Rng) -> Iterator[Case]:
    """Yield the 256 experts of DeepSeek-V3, without close ranks."""
    logits = rng.permutation(np.arange(-128, 128) / 64.0)[None]
    attrs = {
        "k": 8, "kind": "sigmoid", "groups": 8, "chosen": 4, "best_of": 2,
        "renormalize": True,
    }  # fmt: skip
    yield Case("edges/1x8x32", (logits, ExpertBias()), attrs)


def _expert_linear(rng: Rng) -> Iterator[Case]:
    ids = rng.integers(0, 4, (33, 3)).astype(np.int32)
    w = ExpertLinear(rng.standard_normal((4, 300, 202)) / 14)
    yield Case("edges/33x4x3/300x202", (rng.standard_normal((33, 3, 202)), ids, w))


def _slotted_step(rng: Rng) -> Step:
    """Return a step of short and long chunks, new ones among them, in far slots."""
    step, _ = random_step(rng, [5, 9, 0, 4, 0], [1, 2, 2, 70, 130])
    return step._replace(slots=np.array([299, 3, 258, 7, 300], np.int32))


def _causal_conv(rng: Rng) -> Iterator[Case]:
    step = _slotted_step(rng)
    x = rng.standard_normal((step.tokens.shape[0], TAIL))
    table = rng.standard_normal((301, 3, TAIL))
    w = Taps(rng.standard_normal((TAIL, 1, 4)))
    yield Case(f"edges/{TAIL} channels", (x, table, step, w))


def _delta_rule(rng: Rng) -> Iterator[Case]:
    """Yield many heads and chunks, and factors of decay down to zero."""
    step = _slotted_step(rng)
    tokens, dim = step.tokens.shape[0], 8
    k = rng.standard_normal((tokens, 4, dim))
    q = k + 0.5 * rng.standard_normal(k.shape)
    v = rng.standard_normal((tokens, 32, dim))
    a, b = rng.standard_normal((2, tokens, 32))
    a[::9] = 40.0
    table = rng.standard_normal((301, 32, dim, dim))
    w = Decay(rng.uniform(-1, 1, 32), rng.standard_normal(32))
    yield Case("edges/32 heads", (q, k, v, a, b, table, step, w), {"tiled": False})


def _read_slots(rng: Rng) -> Iterator[Case]:
    step, _ = random_step(rng, [3, 2, 0], [1, 1, 5])
    yield Case("edges/matrices", (rng.standard_normal((5, 3, 4)), step))


def _write_slots(rng: Rng) -> Iterator[Case]:
    for case in _read_slots(rng):
        table, step = case.args
        x = rng.standard_normal((step.tokens.shape[0], *table.shape[1:]))
        yield replace(case, args=(x, table, step))


def _chunk_rows(rng: Rng) -> Iterator[Case]:
    step, _ = random_step(rng, [3, 8, 0], [1, 1, 7])
    blocks = np.concatenate([step.blocks, step.blocks[..., ::-1]])
    step = step._replace(blocks=blocks, writes=step.writes.repeat(2, 0))
    yield Case("edges/2 groups", (step,), {"chunk": 8, "block_size": 4})


def _temper_queries(rng: Rng) -> Iterator[Case]:
    """Yield positions at which a product with 1 / floor is below a whole number."""
    positions = np.array([*range(40, 1600, 41), 8190, 100_002], np.int32)
    q = rng.standard_normal((len(positions), 2, 8))
    yield Case("edges/floor 41", (q, positions), {"floor": 41, "gain": 0.5})


EDGES: Final[Mapping[str, Callable[[Rng], Iterator[Case]]]] = {
    "admit": _admit,
    "causal_conv": _causal_conv,
    "chunk_rows": _chunk_rows,
    "delta_rule": _delta_rule,
    "embedding": _embedding,
    "expand_rows": _expand_rows,
    "expert_linear": _expert_linear,
    "full_attention": _full_attention,
    "gated_activation": _gated_activation,
    "group_route": _group_route,
    "make_step": _make_step,
    "mask_logits": _mask_logits,
    "pool": _pool,
    "prune_last_layer": _prune_last_layer,
    "read_slots": _read_slots,
    "rms_norm": _rms_norm,
    "rope_table": _rope_table,
    "route": _route,
    "sample": _sample,
    "score": _score,
    "temper_queries": _temper_queries,
    "unit_rows": _unit_rows,
    "verify": _verify,
    "write_slots": _write_slots,
}
"""Other ops."""
