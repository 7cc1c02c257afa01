"""Parameters that are row slices of a stored tensor, or stored with an offset."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import dequantize
from inl.dtypes import HostArray, wrap
from inl.errors import WeightMismatch
from inl.spec.op import Spec
from inl.spec.weights import Group, Param, RowSlices
from inl.testing.tiny import MemoryCheckpoint
from inl.weights.load import adjusted, read_shard
from inl.weights.plan import WeightPlan, check_tensors, plan_weights

STORED = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
TURNED = Param("fused", (4, 64), axis=0, row_slices=RowSlices(((6, 8), (1, 3)), 8))


def test_row_slices_are_concatenated_in_order():
    found = adjusted(wrap(STORED), TURNED)
    assert found.shape == (4, 64)
    assert np.array_equal(found.data, STORED[[6, 7, 1, 2]])


def test_one_span_is_a_view():
    found = adjusted(wrap(STORED), TURNED._replace(row_slices=RowSlices(((2, 6),), 8)))
    assert np.shares_memory(found.data, STORED)


def test_quantized_rows_are_not_decoded():
    packed = gguf.quantize(STORED, gguf.GGMLQuantizationType.Q8_0)
    array = HostArray(packed, "q8_0", STORED.shape)
    expected = dequantize(array)[[6, 7, 1, 2]]
    found = adjusted(array, TURNED)
    assert found.dtype == "q8_0"
    assert np.array_equal(dequantize(found), expected)


def test_an_offset_is_added_before_rounding():
    tiny = np.array([1e-9, -1.0, 0.5], np.float32)
    found = adjusted(wrap(tiny), Param("norm", (3,), offset=1.0))
    assert found.data.tolist() == (1.0 + tiny.astype(np.float64)).tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_shard_the_logical_rows(rank):
    planned = WeightPlan(Group("linear", weight=TURNED), None, 2)
    files = MemoryCheckpoint({}, {"fused": STORED})
    found = read_shard(files, planned, TURNED, rank, "float32")
    assert np.array_equal(found.data, STORED[[6, 7, 1, 2]][2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(("ranks", "is_split"), [(2, False), (4, True)])
@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_ranks_keep_the_blocks_that_they_do_not_split(kind, ranks, is_split):
    numbers = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    data = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind.upper()])
    files = MemoryCheckpoint({}, {"out": HostArray(data, kind, (5, 64))})
    param = Param("out", (5, 64), axis=1)
    planned = WeightPlan(Group("linear", weight=param), None, ranks)
    whole, width = dequantize(files.tensor("out")), 64 // ranks
    for rank in range(ranks):
        found = read_shard(files, planned, param, rank, "float32")
        assert found.dtype == ("float32" if is_split else kind)
        assert found.shape == (5, width)
        part = slice(rank * width, (rank + 1) * width)
        assert np.array_equal(dequantize(found), whole[:, part])


def test_can_pack_gets_the_logical_shape():
    seen = {}

    class Asked:
        op, pack, preference = "linear", None, 0

        def can_pack(self, **specs):
            seen.update(specs)

    plan_weights(
        Group("linear", weight=TURNED), (Asked(),), {"fused": Spec((8, 64), "q8_0")}
    )
    assert seen == {"weight": Spec((4, 64), "q8_0")}


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12])
def test_ranks_select_their_rows_only(ranks):
    spans = ((6, 8), (0, 5), (7, 8), (1, 5))
    param = Param("fused", (12, 64), axis=0, row_slices=RowSlices(spans, 8))
    plan = WeightPlan(Group("linear", weight=param), None, ranks)
    files = MemoryCheckpoint({}, {"fused": STORED})
    rows = [row for span in spans for row in range(*span)]
    parts = [read_shard(files, plan, param, rank, "float32") for rank in range(ranks)]
    assert np.array_equal(np.concatenate([each.data for each in parts]), STORED[rows])


def test_ranks_without_padding_copy_no_rows():
    spans = (0, 8), (7, 8), (7, 8)
    param = Param("fused", (10, 64), axis=0, row_slices=RowSlices(spans, 8))
    plan = WeightPlan(Group("linear", weight=param), None, 5)
    files = MemoryCheckpoint({}, {"fused": STORED})
    for rank in range(4):
        found = read_shard(files, plan, param, rank, "float32")
        assert np.shares_memory(found.data, files.tensor("fused").data)


def test_check_tensors_compares_stored_shapes():
    tree = WeightPlan(Group("linear", weight=TURNED), None)
    check_tensors(tree, {"fused": Spec((8, 64), "float32")}, "here")
    with pytest.raises(
        WeightMismatch, match=r"fused has shape \[4, 64\], expected \[8"
    ):
        check_tensors(tree, {"fused": Spec((4, 64), "float32")}, "here")
    with pytest.raises(WeightMismatch, match=r"missing fused \[8, 64\]"):
        check_tensors(tree, {}, "here")


PUBLISHED = (
    "mtp.norm.weight", "model.mtp.norm.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.layers.0.self_attn.masked_bias",
)  # fmt: skip
"""Tensors of published files that no model reads."""


def test_tensors_that_draft_or_are_computed_are_left_out():
    tree = {"out": WeightPlan(Group("linear", weight=Param("out", (4, 8))), None)}
    stored = {"out": Spec((4, 8), "float32")}
    for name in PUBLISHED:
        check_tensors(tree, stored | {name: Spec((8,), "float32")}, "m")
    with pytest.raises(WeightMismatch, match=r"unused x\.mtp\.norm\.weight"):
        check_tensors(tree, stored | {"x.mtp.norm.weight": Spec((8,), "float32")}, "m")
