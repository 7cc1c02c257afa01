"""Pipeline schedules against counts of their own, and what is refused."""

from __future__ import annotations

import pytest

from inl.errors import RequestError
from inl.optimizers import (
    HybridSchedule,
    InterleavedSchedule,
    PipelineSchedule,
    apply_kernel_fusion,
    autotune,
    pipeline_bubble,
    quantize_for_inference,
)
from inl_toolkit.optimizers.pipeline import Slot


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("batches", [1, 3, 8])
def test_schedules_are_valid_and_have_the_bubble_of_the_formula(stages, batches, kind):
    schedule = PipelineSchedule(stages, batches, kind=kind)
    assert schedule.bubble == pytest.approx((stages - 1) / (batches + stages - 1))
    assert pipeline_bubble(stages, batches) == pytest.approx(schedule.bubble)
    when = {
        (stage, slot): time
        for stage, row in enumerate(schedule.rows)
        for time, slot in enumerate(row)
        if slot is not None
    }
    assert len(when) == 2 * stages * batches
    for (stage, slot), time in when.items():
        forward = Slot(slot.micro_batch, False)
        if not slot.backward and stage:
            assert when[stage - 1, slot] < time
        if slot.backward and stage < stages - 1:
            assert when[stage + 1, slot] < time
        if slot.backward:
            assert when[stage, forward] < time
    most = batches if kind == "gpipe" else min(stages, batches)
    assert schedule.most_held == most


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("turns", [1, 3])
def test_interleaved_schedules_have_the_bubble_of_the_formula(stages, turns, chunks):
    batches = stages * turns
    schedule = InterleavedSchedule(stages, batches, chunks=chunks)
    idle = (stages - 1) / (chunks * batches + stages - 1)
    assert schedule.bubble == pytest.approx(idle)
    assert pipeline_bubble(stages, batches, chunks) == pytest.approx(idle)
    when = {
        (slot.chunk * stages + stage, slot.micro_batch, slot.backward): time
        for stage, row in enumerate(schedule.rows)
        for time, slot in enumerate(row)
        if slot is not None
    }
    assert len(when) == 2 * stages * chunks * batches
    for (part, batch, backward), time in when.items():
        if backward and part < stages * chunks - 1:
            assert when[part + 1, batch, True] < time
        if not backward and part:
            assert when[part - 1, batch, False] < time
        if backward:
            assert when[part, batch, False] < time


def test_inference_has_no_backward_passes():
    schedule = PipelineSchedule(3, 5, training=False)
    assert schedule.bubble == pytest.approx(2 / 7)
    assert not any(slot and slot.backward for row in schedule.rows for slot in row)


@pytest.mark.parametrize("split", [(1, 1, 1), (2, 4, 1), (1, 3, 2), (2, 2, 3)])
def test_hybrid_schedules_run_every_micro_batch_once(split):
    tensor, pipeline, data = split
    batches = 6
    schedule = HybridSchedule(
        tensor=tensor, pipeline=pipeline, data=data, micro_batches=batches
    )
    rows = schedule.rows
    assert len(rows) == tensor * pipeline * data
    idle = sum(row.count(None) for row in rows) / sum(map(len, rows))
    each = batches // data
    assert idle == pytest.approx((pipeline - 1) / (each + pipeline - 1))
    assert schedule.bubble == pytest.approx(idle)
    # Device (copy, stage, rank): the ranks of a stage work alike.
    for first in range(0, len(rows), tensor):
        assert all(row == rows[first] for row in rows[first : first + tensor])
    per_copy = pipeline * tensor
    for stage in range(pipeline):
        done = [
            slot.micro_batch
            for copy in range(data)
            for slot in rows[copy * per_copy + stage * tensor]
            if slot is not None and not slot.backward
        ]
        assert sorted(done) == list(range(batches))


def test_refusals():
    for call, message in (
        (lambda: pipeline_bubble(0, 1), "stages: found 0"),
        (lambda: HybridSchedule(data=2, micro_batches=3), "micro_batches: found 3"),
        (lambda: HybridSchedule(tensor=0, micro_batches=3), "tensor: found 0"),
        (lambda: autotune(len, search={"block_size": [1]}), "found builtin_function"),
        (lambda: InterleavedSchedule(2, 3), "micro_batches: found 3"),
        (lambda: InterleavedSchedule(2, 2, chunks=0), "chunks: found 0"),
        (lambda: PipelineSchedule(2, 2, kind="zigzag"), "kind: found 'zigzag'"),
        (lambda: quantize_for_inference(object(), "int3"), "dtype: found 'int3'"),
        (lambda: quantize_for_inference(object()), "found object, accepted: a torch"),
        (lambda: apply_kernel_fusion(object(), "magic"), "strategy: found 'magic'"),
        (lambda: apply_kernel_fusion(object()), "apply_kernel_fusion: found object"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
