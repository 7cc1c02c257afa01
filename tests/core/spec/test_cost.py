"""FLOPs and bytes of ops, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from inl.ops import catalog
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.mlp import GatedMlp
from inl.ops.moe import Experts
from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.op import Cost, Spec
from inl.spec.step import Bucket, Step
from inl.spec.strict_array import StrictArray
from inl.spec.weights import Group, Param
from inl.weights.plan import plan_weights


def half(*shape):
    return StrictArray(shape, "bfloat16")


def ints(*shape):
    return StrictArray(shape, "int32")


def step_of(tokens, rows, blocks):
    """A step of one cache group whose tables have ``blocks`` blocks a row."""
    return Step(
        ints(tokens), ints(tokens), ints(tokens), ints(rows + 1), ints(rows),
        ints(rows), ints(1, rows, blocks), ints(1, tokens), ints(rows), ints(rows),
        ints(3), ints(rows),
    )  # fmt: skip


def cost(op, results, *args, **attrs):
    return catalog()[op].cost(results, *args, **attrs)


def test_linear_reads_its_matrix_once():
    found = cost("linear", half(3, 20), half(3, 10), Linear(half(20, 10), half(20)))
    # 3 x 20 x 10 multiply-adds; x 30, weight 200, bias 20 and y 60 elements.
    assert found == Cost(2 * 600, 2 * (30 + 200 + 20 + 60))


def test_packed_weights_count_what_is_stored():
    weight = StrictArray((32, 64), "bfloat16", layout="blocks", stored_bytes=32 * 40)
    found = cost("linear", half(1, 32), half(1, 64), Linear(weight))
    assert found == Cost(2 * 32 * 64, 2 * (64 + 32) + 1280)


def test_a_packed_group_counts_the_size_of_the_checkpoint():
    group = Group("linear", weight=Param("w", (64, 32), axis=0))
    stored = {"w": Spec((64, 32), "q4_1")}  # blocks of 32 in 20 bytes
    packs = Kernel("linear", "x", print, layout="blocks", pack=print)
    for ranks in (1, 2):
        w = plan_weights(group, (packs,), stored, ranks=ranks).specs("bfloat16")
        assert w.weight.stored_bytes == 64 * 20 // ranks
    plain = plan_weights(group, (), stored).specs("bfloat16")
    assert plain.weight.stored_bytes is None


@pytest.mark.parametrize(("ranks", "size"), [(1, 4 * 60), (3, 4 * 20), (2, None)])
def test_a_shard_that_ends_within_a_block_counts_as_decoded(ranks, size):
    group = Group("linear", weight=Param("w", (4, 96), axis=1))
    stored = {"w": Spec((4, 96), "q4_1")}
    packs = Kernel("linear", "x", print, layout="blocks", pack=print)
    w = plan_weights(group, (packs,), stored, ranks=ranks).specs("bfloat16")
    assert w.weight.layout == "blocks"
    assert w.weight.stored_bytes == size


def test_rms_norm_reads_and_writes_each_element():
    found = cost("rms_norm", half(5, 8), half(5, 8), Norm(half(8)), eps=1e-5)
    assert found == Cost(4 * 40, 2 * (40 + 8 + 40))


def test_an_embedding_reads_rows_and_not_the_table():
    found = cost("embedding", half(3, 16), ints(3), Embedding(half(50_000, 16)))
    assert found == Cost(0, 4 * 3 + 2 * 3 * 16 + 2 * 3 * 16)


@pytest.mark.parametrize(("window", "keys", "read"), [(None, 32, 32), (6, 6, 6)])
def test_attention_of_decoding_rows_at_full_context(window, keys, read):
    # 2 rows of one token each, 4 heads over 2, 8 lanes, 8 blocks of 4 positions.
    q, cache = half(2, 4, 8), Cache(half(99, 4, 2, 8), half(99, 4, 2, 8))
    found = cost(
        "attention", half(2, 4, 8), q, cache, step_of(2, 2, 8),
        scale=1.0, window=window, cap=None, group=0,
    )  # fmt: skip
    flops = 2 * 4 * keys * 8 * 2 * 2  # rows, heads, keys, lanes, 2 products
    cached = 2 * read * 2 * 8 * 2 * 2  # rows, keys, key heads, lanes, k and v, bytes
    assert found == Cost(flops, 2 * 64 + 2 * 64 + cached)


def test_a_prompt_with_a_window_reads_the_keys_of_all_its_queries():
    q, cache = half(5, 4, 8), Cache(half(99, 4, 2, 8), half(99, 4, 2, 8))
    found = cost(
        "attention", q, q, cache, step_of(5, 1, 8),
        scale=1.0, window=6, cap=None, group=0,
    )  # fmt: skip
    assert found.bytes == 2 * 2 * 160 + (6 + 5 - 1) * 2 * 8 * 2 * 2


def test_attend_adds_the_written_positions_and_int8_their_scales():
    kv = StrictArray((9, 4, 2, 8), "int8")
    q, k, cache = half(2, 4, 8), half(2, 2, 8), Cache(kv, kv)
    found = cost(
        "attend", (q, cache), q, k, k, cache, step_of(2, 2, 8),
        scale=1.0, window=None, cap=None, group=0,
    )  # fmt: skip
    position = 2 * 2 * (8 + 4)  # k and v, heads, lanes and a float32 scale
    dense = 2 * (64 + 64 + 32 + 32)
    assert found.bytes == dense + 2 * position + 2 * 32 * position


def test_a_gated_mlp_counts_each_of_its_products_by_its_own_sizes():
    w = GatedMlp(half(30, 10), half(30, 10), half(10, 30))
    found = cost("gated_mlp", half(2, 10), half(2, 10), w, activation="silu")
    assert found == Cost(2 * 2 * 900 + 5 * 60, 2 * (20 + 900 + 20))


@pytest.mark.parametrize(("tokens", "read"), [(1, 2), (3, 6), (40, 8)])
def test_experts_read_as_many_matrices_as_are_chosen(tokens, read):
    w = Experts(half(8, 6, 4), half(8, 6, 4), half(8, 4, 6))
    weights = StrictArray((tokens, 2), "float32")
    x = half(tokens, 4)
    found = cost("experts", x, x, ints(tokens, 2), weights, w, activation="silu")
    assert found.flops == 2 * 3 * 24 * 2 * tokens
    assert found.bytes == tokens * (2 * 4 + 2 * 4 + 4 * 2 + 4 * 2) + read * 72 * 2


def test_logits_are_computed_for_sampled_rows_only():
    args = half(9, 10), half(9, 10), ints(2), Norm(half(10)), Linear(half(50, 10))
    found = cost("norm_logits", half(2, 50), *args, eps=1e-5)
    assert found.flops == 2 * 2 * 50 * 10 + 5 * 20
    assert found.bytes == 2 * (20 + 20 + 10 + 500 + 100) + 4 * 2


def test_tables_count_what_a_step_touches():
    """Every op between the message and the tokens, with large tables: few bytes."""
    from inl.ops.step import empty_tables, make_step

    wide = empty_tables(
        groups=1, slots=4097, max_blocks_per_seq=64, vocab=50_000,
        zeros=StrictArray,
    )  # fmt: skip
    bucket = Bucket(2, 2)
    message = ints(64)
    results = make_step.shapes(message, wide, bucket=bucket, block_size=16)
    made = make_step.cost(results, message, wide, bucket=bucket, block_size=16)
    assert made.bytes < 4096
    sampled = ints(2), wide
    logits = StrictArray((2, 50_000), "float32")
    chosen = cost("sample", sampled, logits, results[0], wide, sampler="greedy")
    assert 400_000 <= chosen.bytes < 401_000
    admitted = cost("admit", wide, ints(1, 90), wide)
    assert 400_000 <= admitted.bytes < 401_000
    table = half(4097, 576)
    written = cost("write_slots", table, half(2, 576), table, results[0])
    assert written.bytes < 2 * 2 * 2 * 576 + 100
    read = cost("read_slots", half(2, 576), table, results[0])
    assert read.bytes < 2 * 2 * 2 * 576 + 100
