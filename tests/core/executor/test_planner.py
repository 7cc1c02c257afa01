"""Placement of models on devices, against counts of their memory."""

from __future__ import annotations

import pytest

from inl.errors import RequestError
from inl.executor.planner import get_optimal_parallelism

LLAMA_8B = {
    "model_size_params": 8_030_261_248, "layers": 32, "hidden": 4096, "kv_heads": 8,
    "head_dim": 128,
}  # fmt: skip


def test_a_small_model_is_copied_to_every_device():
    plan = get_optimal_parallelism(
        model_size_params=350_000_000, num_devices=8, memory_per_device_gb=80
    )
    assert (plan.tensor_parallel, plan.pipeline_parallel, plan.data_parallel) == (
        1,
        1,
        8,
    )
    assert plan.fits
    assert plan.weight_bytes == 700_000_000
    assert any("guessed from the size" in reason for reason in plan.reasons)


def test_memory_decides():
    one = get_optimal_parallelism(num_devices=4, memory_per_device_gb=80, **LLAMA_8B)
    assert one.data_parallel == 4
    # Keys and values of a token: 2 * 32 layers * 8 heads * 128 * 2 bytes.
    assert one.kv_bytes == 2048 * 131_072
    two = get_optimal_parallelism(num_devices=4, memory_per_device_gb=12, **LLAMA_8B)
    assert (two.tensor_parallel, two.data_parallel) == (2, 2)
    assert any("tensor parallel 1 with 4 copies would need" in r for r in two.reasons)
    assert two.total_bytes <= two.budget_bytes == int(12e9 * 0.9)
    none = get_optimal_parallelism(num_devices=2, memory_per_device_gb=4, **LLAMA_8B)
    assert not none.fits
    assert none.reasons[-1].startswith("nothing fits")


def test_training_needs_gradients_and_optimizer_state():
    plan = get_optimal_parallelism(
        num_devices=8, memory_per_device_gb=80, training=True, **LLAMA_8B
    )
    parameters = LLAMA_8B["model_size_params"] / (8 / plan.data_parallel)
    assert plan.optimizer_bytes == pytest.approx(12 * parameters)
    assert plan.gradient_bytes == pytest.approx(2 * parameters)
    assert plan.kv_bytes == 0
    assert plan.data_parallel < 8


def test_heads_and_layers_are_divided_evenly():
    shape = {**LLAMA_8B, "kv_heads": 3, "layers": 30}
    plan = get_optimal_parallelism(num_devices=6, memory_per_device_gb=8, **shape)
    assert 3 % plan.tensor_parallel == 0
    assert 30 % plan.pipeline_parallel == 0
    assert any("not a divisor of 3 key-value heads" in r for r in plan.reasons)


def test_numbers_below_one_are_refused():
    with pytest.raises(RequestError, match="num_devices: found 0"):
        get_optimal_parallelism(
            model_size_params=1, num_devices=0, memory_per_device_gb=1
        )
