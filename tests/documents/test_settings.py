"""Every keyword of the documented functions changes a result, or is refused.

``CASES`` has a pair of settings for each keyword: what the function does with the one
differs from what it does with the other. A keyword without a pair fails a test.
"""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

import inl
from inl import inference, kernels, optimizers
from inl.errors import BackendUnavailable, InlError
from inl.kernels.tpu import TPUAttentionKernel, TPULayerNormKernel
from inl_toolkit.kernels.config import configured as in_force

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")

RNG = np.random.default_rng(4)
A, B, C = (RNG.standard_normal((2, 12, 12)).astype(np.float32) for _ in range(3))
ROUTES = RNG.standard_normal((12, 3)).astype(np.float32)
EXPERTS = RNG.standard_normal((3, 12, 12)).astype(np.float32)
BLOCKS = RNG.standard_normal((2, 4, 4)).astype(np.float32)
MODEL = {"model_size_params": 8e9, "num_devices": 4, "memory_per_device_gb": 12}
ABSENT = "refused: "


def seen(run):
    """The result of a call as arrays, and the kernels that it ran; or the error."""
    try:
        with kernels.profile_kernel() as profile:
            result = run()
    except InlError as error:
        return [f"{ABSENT}{type(error).__name__}: {error}"]
    leaves = result if isinstance(result, (tuple, list)) else [result]
    events = [event.name for event in profile.events]
    return [*(np.asarray(each) if hasattr(each, "shape") else each for each in leaves),
            events]  # fmt: skip


def same(first, second):
    if len(first) != len(second):
        return False
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(first, second, strict=True)
    )


def configured(**fields):
    """What kernels do inside a function with these fields; and what the log says."""

    def body(a, b):
        count.append(1)
        return (
            kernels.gemm(a, b), kernels.flash_attention(a, b, b, block_size=None),
            kernels.layer_norm(a),
        )  # fmt: skip

    count: list[int] = []
    fields = {"auto_optimize": False, **fields}
    kernel = kernels.tpu_kernel(**fields)(body)
    array = torch.asarray if "use_tensor_cores" in fields else jnp.asarray
    a, b = array(A[0]), array(B[0])
    first = kernel(a, b)
    kernel(a, b)
    notes = [each for each in kernel.notes if "tensor" in each]
    return [*first, len(count), notes]


def decorated(decorator):
    """What is in force inside a decorated function, and where it runs."""

    def run(**settings):
        inside = []

        def body(x, w):
            inside.append(in_force())
            return x * 2

        kernel = decorator(**settings)(body)
        return [kernel(A[0], EXPERTS), inside, kernel.why_not(), kernel.notes]

    return run


def quantized(**settings):
    torch.manual_seed(0)
    found = optimizers.quantize_for_inference(torch.nn.Linear(64, 8), **settings)
    (layer,) = found.quantization.layers
    return [layer.error, layer.bytes_after]


def fused(**settings):
    found = optimizers.apply_kernel_fusion(jnp.sin, **settings).fusion
    return [found.strategy, found.fused, found.why_not, found.seconds_after is None]


def planned(**settings):
    if "tied" in settings:  # only of the CPU's backend
        settings = {"device": "cpu", **settings}
    if "heads" in settings:  # attention that is not fused, see the planner
        training = {"device": "cuda", "training": True, "bytes_per_param": 4}
        settings = {**training, "kv_heads": 8, **settings}
    if {"experts", "expert_params", "expert_copies"} & settings.keys():
        tight = {"memory_per_device_gb": 8, "kv_heads": 1, "experts": 8}
        settings = {**tight, "expert_params": int(7e9), **settings}
    plan = optimizers.get_optimal_parallelism(**{**MODEL, **settings})
    return list(dataclasses.astuple(plan))


def scheduled(made):
    def run(**settings):
        schedule = made(**settings)
        return [str(schedule.rows), schedule.bubble]

    return run


def tuned(**settings):
    settings = {"search": {"precision": ["bfloat16"]}, "repeat": 1, **settings}
    kernel = kernels.cpu_kernel(lambda a: kernels.gemm(a, a))
    calls = []
    trials = optimizers.autotune(kernel, A[0], **settings).trials
    with kernels.profile_kernel() as profile:
        optimizers.autotune(kernel, A[0], **settings)
    calls.append(len(profile.events))
    return [[(each.fields, bool(each.rejected)) for each in trials], calls]


def streamed(**settings):
    class Engine:
        def stream(self, prompt, **options):
            yield from (prompt, str(options))

    return list(inference.StreamingSession(Engine(), "one two. three " * 9, **settings))


def attention(**settings):
    return kernels.flash_attention(A, B, C, **settings)


def dispatched(**settings):
    return kernels.moe_dispatch(A[0], ROUTES, EXPERTS, **settings)


def compiled(**settings):
    from inl.kernels.tpu import compile_tpu_kernel

    given = {
        "name": "settings", "fn": lambda x: x * 2, "input_shapes": [(2, 2)],
        "output_shapes": [(2, 2)], "input_dtypes": ["float32"],
        "output_dtypes": ["float32"], **settings,
    }  # fmt: skip
    kernel = compile_tpu_kernel(**given)
    return [kernel(jnp.ones((2, 2))), kernel.name]


def dynamics(**settings):
    return inl.inl_dynamics(A, B, C, 0.5 * A, 0.1 * B, C, **settings)


PAIRS = {
    "KernelConfig": (kernels.KernelConfig, configured, {
        "block_size": (None, 6), "use_bfloat16": (False, True),
        "use_fp16": (False, True), "precision": ("default", "float8_e4m3fn"),
        "use_efficient_attention": (True, False), "use_fused_ops": (True, False),
        "use_tensor_cores": (False, True), "auto_optimize": (False, True),
        "fallback": ("auto", "error"),
    }),
    "flash_attention": (kernels.flash_attention, attention, {
        "mask": (None, A > 0), "causal": (False, True), "window": (None, 3),
        "block_mask": (None, [[False]]), "scale": (None, 2.0),
        "block_size": (None, 1), "use_flash": (True, False),
    }),
    "gemm": (kernels.gemm, lambda **s: kernels.gemm(A, B, **s), {
        "block_size": (None, 1), "use_bfloat16": (None, True),
        "use_fp16": (None, True), "precision": (None, "float8_e4m3fn"),
    }),
    "layer_norm": (
        kernels.layer_norm, lambda **s: kernels.layer_norm(jnp.asarray(A), **s),
        {"eps": (1e-5, 1.0), "use_fused_ops": (True, False)},
    ),
    "create_rope_cache": (
        kernels.create_rope_cache,
        lambda **s: [type(t) for t in kernels.create_rope_cache(4, 4, **s)]
        + list(kernels.create_rope_cache(4, 4, **s)),
        {"theta": (1e4, 10.0), "array": (None, torch.ones(1))},
    ),
    "block_sparse_matmul": (
        kernels.block_sparse_matmul,
        lambda **s: kernels.block_sparse_matmul(A, BLOCKS, [[0, 0], [1, 1]], **s),
        {"columns": (8, 12)},
    ),
    "moe_dispatch": (kernels.moe_dispatch, dispatched, {
        "k": (1, 2), "capacity_factor": (0.2, 4.0),
        "kind": ("softmax_topk", "topk_softmax"), "activation": ("silu", "gelu"),
    }),
    "inl_dynamics": (inl.inl_dynamics, dynamics, {"dt": (0.1, 0.2)}),
    "tpu_kernel": (kernels.tpu_kernel, decorated(kernels.tpu_kernel), {
        "config": (None, kernels.KernelConfig(block_size=4)),
        "block_size": (None, 3),
    }),
    "gpu_kernel": (kernels.gpu_kernel, decorated(kernels.gpu_kernel), {
        "config": (None, kernels.KernelConfig(block_size=4)),
        "use_flash": (None, False), "block_size": (None, 3),
    }),
    "cpu_kernel": (kernels.cpu_kernel, decorated(kernels.cpu_kernel), {
        "config": (None, kernels.KernelConfig(block_size=4)),
        "block_size": (None, 3),
    }),
    "sparse_kernel": (kernels.sparse_kernel, decorated(kernels.sparse_kernel), {
        "platform": ("cpu", "tpu"), "block_size": (12, 128),
        "config": (None, kernels.KernelConfig(block_size=4)),
    }),
    "expert_kernel": (kernels.expert_kernel, decorated(kernels.expert_kernel), {
        "platform": ("cpu", "gpu"), "num_experts": (3, 8), "block_size": (None, 3),
        "config": (None, kernels.KernelConfig(block_size=4)),
    }),
    "quantize_for_inference": (
        optimizers.quantize_for_inference, quantized, {"dtype": ("int8", "int4")},
    ),
    "apply_kernel_fusion": (optimizers.apply_kernel_fusion, fused, {
        "strategy": ("xla", "triton"), "example": (None, (jnp.ones(2),)),
    }),
    "get_optimal_parallelism": (optimizers.get_optimal_parallelism, planned, {
        "model_size_params": (8e9, 1e9), "num_devices": (4, 2),
        "memory_per_device_gb": (12, 80), "training": (False, True),
        "batch": (1, 64), "context": (2048, 32768), "bytes_per_param": (2, 0.5),
        "kv_bytes_per_value": (2, 1), "layers": (32, 64), "hidden": (4096, 8192),
        "kv_heads": (8, 32), "head_dim": (128, 64), "inner": (14336, 4096),
        "vocab": (128256, 32000), "step_tokens": (4096, 512),
        "device": (None, "cuda"), "tied": (False, True),
        "heads": (32, 64), "experts": (1, 8), "expert_params": (0, int(7e9)),
        "state_bytes": (0, int(1e8)), "expert_copies": (0, 2),
    }),
    "PipelineSchedule": (
        optimizers.PipelineSchedule,
        scheduled(lambda **s: optimizers.PipelineSchedule(3, 4, **s)),
        {"kind": ("gpipe", "1f1b"), "training": (True, False)},
    ),
    "HybridSchedule": (
        optimizers.HybridSchedule,
        scheduled(lambda **s: optimizers.HybridSchedule(
            **{"pipeline": 3, "micro_batches": 4, **s})),
        {
            "tensor": (1, 2), "pipeline": (3, 2), "data": (1, 2),
            "micro_batches": (4, 8), "kind": ("gpipe", "1f1b"),
            "training": (True, False),
        },
    ),
    "autotune": (optimizers.autotune, tuned, {
        "search": ({"precision": ["bfloat16"]}, {"block_size": [1, 2]}),
        "tolerance": (0.5, 0.0), "repeat": (1, 3),
    }),
    "to_tiles": (
        optimizers.to_tiles, lambda **s: optimizers.to_tiles(A[..., None], **s),
        {"tile": (4, 6), "pad": (True, False)},
    ),
    "StreamingSession": (inference.StreamingSession, streamed, {
        "unit": ("token", "word"), "chunk_size": (3, 7),
    }),
    "TPUAttentionKernel": (
        TPUAttentionKernel,
        lambda **s: TPUAttentionKernel(auto_optimize=False, **s)(A, B, C),
        {
            "use_flash": (True, False), "causal": (False, True), "window": (None, 2),
            "block_mask": (None, [[False]]), "scale": (None, 2.0),
            "precision": ("default", "bfloat16"),
        },
    ),
    "TPULayerNormKernel": (
        TPULayerNormKernel,
        lambda **s: TPULayerNormKernel(auto_optimize=False, **s)(A),
        {"eps": (1e-5, 1.0), "fallback": ("auto", "error")},
    ),
    "compile_tpu_kernel": (
        kernels.tpu.compile_tpu_kernel, compiled,
        {
            "name": ("settings", "another"), "fn": (jnp.sin, jnp.cos),
            "input_shapes": ([(2, 2)], [(3, 2)]),
            "output_shapes": ([(2, 2)], [(3, 2)]),
            "input_dtypes": (["float32"], ["int32"]),
            "output_dtypes": (["float32"], ["int32"]),
        },
    ),
}  # fmt: skip
"""What is set, a function of the settings, and two values of each."""
ALSO = {
    ("moe_dispatch", "capacity_factor"): {},
    ("to_tiles", "pad"): {"tile": 5},
    ("StreamingSession", "chunk_size"): {"unit": "chunk"},
}
"""Further settings that a keyword needs to have an effect."""
CASES = [(name, keyword) for name, case in PAIRS.items() for keyword in case[2]]


@pytest.mark.parametrize(("name", "keyword"), CASES, ids=lambda each: str(each))
def test_a_setting_has_an_effect(name, keyword):
    _, run, pairs = PAIRS[name]
    also = ALSO.get((name, keyword), {})
    first, second = (
        seen(lambda value=value: run(**{keyword: value, **also}))
        for value in pairs[keyword]
    )
    again = seen(lambda: run(**{keyword: pairs[keyword][0], **also}))
    assert not str(first[0]).startswith(ABSENT), first
    assert same(first, again), "differs by itself"
    assert not same(first, second)


@pytest.mark.parametrize("name", PAIRS)
def test_every_keyword_has_a_pair(name):
    kind, _, pairs = PAIRS[name]
    parameters = inspect.signature(kind).parameters.values()
    wanted = {
        each.name
        for each in parameters
        if each.kind is each.KEYWORD_ONLY or each.default is not each.empty
    } - {"function", "scale", "bias"}
    if name in ("flash_attention", "TPUAttentionKernel"):
        wanted.add("scale")  # a number there, an operand of layer_norm
    accepts_fields = any(each.kind is each.VAR_KEYWORD for each in parameters)
    assert wanted <= {*pairs}
    assert accepts_fields or wanted == {*pairs}


def test_a_device_that_is_required_is_refused_by_name():
    if inl.Device("tpu").is_available():
        pytest.skip("a TPU is here")
    with pytest.raises(BackendUnavailable, match="tpu"):
        configured(fallback="error")
