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


def lanes(batch, **options):
    plan = get_optimal_parallelism(
        num_devices=6, memory_per_device_gb=8, batch=batch, context=64,
        **{**LLAMA_8B, "kv_heads": 3, "layers": 30, **options},
    )  # fmt: skip
    return [reason for reason in plan.reasons if "lanes" in reason]


def test_lanes_of_a_pipeline_are_stated():
    (one,) = lanes(1, kv_heads=1)
    assert one.startswith("pipeline parallel 3: a batch of 1 makes 1 of 3 lanes")
    (many,) = lanes(64, kv_heads=1)
    assert many.startswith("pipeline parallel 3: a batch of 64 makes 3 of 3 lanes")
    assert not lanes(64, kv_heads=6)
    assert not lanes(64, kv_heads=1, training=True)


def test_experts_are_divided_where_heads_are_not():
    """DeepSeek-V2-Lite: one latent head, 64 experts that are most of the weights."""
    given = {
        "model_size_params": 15_706_484_224, "layers": 27, "hidden": 2048, "heads": 16,
        "kv_heads": 1, "head_dim": 576, "inner": 8448, "vocab": 102_400,
        "num_devices": 4, "batch": 4, "experts": 64, "expert_params": 14_394_851_328,
    }  # fmt: skip
    plan = get_optimal_parallelism(memory_per_device_gb=14, **given)
    assert str(plan.placement) == "data=4"
    assert plan.fits
    one = get_optimal_parallelism(memory_per_device_gb=14, **{**given, "batch": 1})
    assert str(one.placement) == "expert=4"
    assert plan.kv_bytes == one.kv_bytes  # each device caches one sequence
    assert any("cache of 1 of 4 sequences" in reason for reason in plan.reasons)
    assert any("and of the cache" in reason for reason in one.reasons)
    params = given["model_size_params"] - given["expert_params"] * 3 // 4
    assert plan.weight_bytes == 2 * params
    assert any("holds 16 of 64 experts" in reason for reason in plan.reasons)
    copied = get_optimal_parallelism(memory_per_device_gb=14, expert_copies=2, **given)
    assert copied.placement == plan.placement
    further = copied.weight_bytes - plan.weight_bytes
    assert further == pytest.approx(given["expert_params"] * 2 // 64 * 2, rel=1e-6)
    heads = get_optimal_parallelism(
        memory_per_device_gb=14, **{**given, "kv_heads": 16, "head_dim": 128}
    )
    assert str(heads.placement) == "tensor=4"
    one = get_optimal_parallelism(memory_per_device_gb=80, **given)
    assert (one.expert_parallel, one.data_parallel) == (1, 4)


# Layers, heads and key-value heads of published models: Llama 2 7B, 13B and 70B,
# Llama 3 8B, Code Llama 34B, Mistral Large, Llama 3.1 405B (with embedding and head).
PUBLISHED = {
    7e9: (32, 32, 32), 8e9: (32, 32, 8), 13e9: (40, 40, 40), 34e9: (48, 64, 8),
    70e9: (80, 64, 8), 123e9: (88, 96, 8), 405e9: (128, 128, 8),
}  # fmt: skip


@pytest.mark.parametrize("params", PUBLISHED)
def test_a_guess_is_the_shape_of_published_models(params):
    plan = get_optimal_parallelism(
        model_size_params=params, num_devices=8, memory_per_device_gb=80
    )
    shape = plan.shape
    assert (shape.layers, shape.heads, shape.kv_heads) == PUBLISHED[params]
    assert shape.guessed
    assert shape.head_dim == 128
    assert shape.hidden == 128 * shape.heads
    said = f"{shape.layers} layers of {shape.hidden}, {shape.heads} heads and"
    assert any(said in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("params", "devices", "memory"),
    [(7e9, 64, 24), (13e9, 64, 24), (34e9, 64, 40), (70e9, 64, 80), (104e9, 64, 80),
     (175e9, 64, 80), (405e9, 512, 80), (671e9, 512, 80)],
)  # fmt: skip
def test_training_fits_where_published_models_of_the_size_do(params, devices, memory):
    """Weights, gradients and optimizer take at most 75 % of all budgets together."""
    given = {"num_devices": devices, "memory_per_device_gb": memory, "training": True}
    plan = get_optimal_parallelism(model_size_params=params, **given)
    assert 16 * params < 0.75 * devices * plan.budget_bytes
    assert plan.fits, plan.reasons
    assert plan.shape.layers % plan.pipeline_parallel == 0
    assert plan.shape.kv_heads % plan.tensor_parallel == 0


def test_guessed_shapes_have_the_given_size():
    for exponent in range(27, 40):
        plan = get_optimal_parallelism(
            model_size_params=2**exponent, num_devices=1, memory_per_device_gb=80
        )
        shape = plan.shape
        heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        layer = shape.hidden * (heads + 3 * shape.inner)
        embedding = shape.vocab * shape.hidden
        assert 0.65 < (shape.layers * layer + embedding) / 2**exponent < 1.5
        assert shape.heads % shape.kv_heads == 0


def test_given_parts_of_a_shape_are_kept():
    given = {"layers": 33, "heads": 20, "kv_heads": 5, "vocab": 99}
    size = {"model_size_params": 7e9, "num_devices": 1, "memory_per_device_gb": 80}
    shape = get_optimal_parallelism(**size, **given).shape
    assert given.items() <= {k: getattr(shape, k) for k in given}.items()
    shape = get_optimal_parallelism(**size, heads=20, hidden=2560).shape
    assert (shape.kv_heads, shape.head_dim, shape.layers) == (20, 128, 88)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("wrong", [0, -1, 2.5, NAN, INF, -INF, "7B", True, [], 10**400])
@pytest.mark.parametrize(
    "name",
    ["model_size_params", "num_devices", "batch", "context", "step_tokens", "layers",
     "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab"],
)  # fmt: skip
def test_counts_are_whole_numbers(name, wrong):
    given = {"model_size_params": 7e9, "num_devices": 2, "memory_per_device_gb": 80}
    with pytest.raises(RequestError, match=rf"^{name}: found .*, accepted: a "):
        get_optimal_parallelism(**{**given, name: wrong})


@pytest.mark.parametrize("wrong", [0, -1, NAN, INF, "80GB", None, True, 10**400])
@pytest.mark.parametrize(
    "name", ["memory_per_device_gb", "bytes_per_param", "kv_bytes_per_value"]
)
def test_sizes_are_numbers(name, wrong):
    given = {"model_size_params": 7e9, "num_devices": 2, "memory_per_device_gb": 80}
    with pytest.raises(RequestError, match=rf"^{name}: found .*, accepted: a "):
        get_optimal_parallelism(**{**given, name: wrong})


def test_switches_are_true_or_false():
    given = {"model_size_params": 7e9, "num_devices": 2, "memory_per_device_gb": 80}
    for wrong in ({"training": "no"}, {"tied": 1}, {"device": "gpu"}, {"device": []}):
        with pytest.raises(RequestError, match=f"^{next(iter(wrong))}: found"):
            get_optimal_parallelism(**given, **wrong)


def test_huge_numbers_take_no_time():
    plan = get_optimal_parallelism(
        model_size_params=10**18, num_devices=10**18, memory_per_device_gb=80,
        layers=10**6, kv_heads=10**6,
    )  # fmt: skip
    assert 10**6 % plan.tensor_parallel == 10**6 % plan.pipeline_parallel == 0


def test_numbers_below_one_are_refused():
    with pytest.raises(RequestError, match="num_devices: found 0"):
        get_optimal_parallelism(
            model_size_params=1, num_devices=0, memory_per_device_gb=1
        )
