"""Test cases of the ops that update tables and build steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from inl.spec.message import (
    DRAFT,
    MAX_TOKEN_BIASES,
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    release_frame,
    step_frame,
    token_bias_frame,
)
from inl.spec.op import Case
from inl.spec.step import Bucket


def step_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases of exact and padded buckets, of drafted tokens and of padding only."""
    from inl.ops.step import empty_tables

    groups, width, size = 2, 6, 4
    tables = empty_tables(groups=groups, slots=5, max_blocks_per_seq=width, vocab=3)
    tables.blocks[:, 1:] = rng.integers(1, 30, (groups, 4, width))
    tables.lengths[1:] = [5, 0, 7, 11]
    tables.last[1:] = rng.integers(0, 90, 4)
    mixed = [
        Row(3, [-1], [0.25]),
        Row(4, [-1], [0.5]),
        Row(2, [int(x) for x in rng.integers(0, 90, 6)]),
    ]
    updates = [
        BlockTableUpdate(0, 4, 2, 17),
        BlockTableUpdate(1, 4, 2, 18),
        BlockTableUpdate(0, 2, 1, 9),
    ]
    for name, bucket in (
        ("exact", Bucket(tokens=8, rows=3)),
        ("padded", Bucket(tokens=12, rows=6, sampler="sample")),
    ):
        message = step_frame(
            bucket,
            mixed,
            updates,
            step=3,
            groups=groups,
            block_size=size,
            decode_rows=2,
        )
        yield Case(name, (message, tables), {"bucket": bucket, "block_size": size})
    bucket = Bucket(tokens=6, rows=2, tokens_per_row=3)
    drafts = [Row(1, [-1, 4, 5], [0.1, 0.2, 0.3]), Row(3, [-1], [0.4])]
    message = step_frame(
        bucket, drafts, step=4, groups=groups, block_size=size, decode_rows=2
    )
    yield Case("drafts", (message, tables), {"bucket": bucket, "block_size": size})
    more = bucket._replace(uniforms=8)
    drafts = [
        Row(1, [-1, DRAFT, DRAFT], list(rng.random(8)), list(range(30, 37))),
        Row(3, [-1, DRAFT], list(rng.random(8)), list(range(50, 57))),
    ]
    message = step_frame(
        more, drafts, step=4, groups=groups, block_size=size, decode_rows=2
    )
    attrs = {"bucket": more, "block_size": size}
    yield Case("more uniforms", (message, tables), attrs, since=(2, 0))
    message = step_frame(
        bucket, (), step=4, groups=groups, block_size=size, decode_rows=0
    )
    yield Case(
        "padding only", (message, tables), {"bucket": bucket, "block_size": size}
    )


def admit_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases of admissions and releases, with and without penalty tables."""
    from inl.ops.step import empty_tables

    ids = [[4, 5, 6], [7, 8, 9]]
    params = {"temperature": 0.7, "top_k": 40.0, "presence_penalty": -0.5}
    frame = admit_frame(
        2, ids, groups=2, max_blocks_per_seq=5, length=12, last=7, adapter=1, **params
    )
    for name, vocab in (("", 11), ("/uncounted", 0)):
        tables = empty_tables(groups=2, slots=4, max_blocks_per_seq=5, vocab=vocab)
        tables.blocks[:] = rng.integers(1, 30, tables.blocks.shape)
        tables.lengths[:] = rng.integers(1, 20, 4)
        tables.token_counts[:] = rng.integers(0, 5, tables.token_counts.shape)
        tables.bias[:] = rng.standard_normal(tables.bias.shape)
        released = release_frame(3, groups=2, max_blocks_per_seq=5)
        yield Case(f"admit{name}", (frame[None], tables))
        yield Case(f"release{name}", (released[None], tables))
        three = np.stack((released, np.zeros_like(frame), frame))
        yield Case(f"several{name}", (three, tables))


def token_bias_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases of no, some and as many tokens as fit in a frame."""
    from inl.ops.step import empty_tables

    tables = empty_tables(groups=1, slots=4, max_blocks_per_seq=2, vocab=300)
    tables.token_counts[:] = rng.integers(0, 5, tables.token_counts.shape)
    tables.bias[:] = rng.standard_normal(tables.bias.shape)
    for used in (0, 3, MAX_TOKEN_BIASES):
        tokens = rng.permutation(300)[:used]
        biases = [
            TokenBias(int(token), int(rng.integers(0, 9)), float(rng.standard_normal()))
            for token in tokens
        ]
        yield Case(str(used), (token_bias_frame(2, biases), tables))
