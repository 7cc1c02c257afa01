"""Kernels on NumPy, torch and JAX arrays, against formulas in float64."""

from __future__ import annotations

import importlib.util
import json
import logging
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from inl.errors import BackendUnavailable, DeviceError, KernelError
from inl.kernels import (
    KernelConfig,
    apply_rope,
    block_sparse_matmul,
    cpu_kernel,
    create_rope_cache,
    decorators,
    expert_kernel,
    flash_attention,
    gemm,
    gpu_kernel,
    layer_norm,
    profile_kernel,
    sparse,
    sparse_kernel,
    tpu_kernel,
)
from inl_toolkit.functional.arrays import like
from inl_toolkit.kernels.precision import rounded

FRAMEWORKS = [
    name for name in ("numpy", "torch", "jax") if importlib.util.find_spec(name)
]


@pytest.fixture(params=FRAMEWORKS)
def make(request):
    """Convert a NumPy array to one of a framework."""
    if request.param == "numpy":
        return lambda x: np.asarray(x)
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        return lambda x: torch.from_numpy(np.array(x))
    return pytest.importorskip("jax.numpy").asarray


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def attention(q, k, v, seen, added=0.0):
    """One softmax in float64; a row that sees nothing is 0."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + added
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / np.where(total > 0, total, 1)


def off(found, exact):
    return np.abs(np.asarray(found) - exact).max() / np.abs(exact).max()


L, S = 37, 53
DISTANCE = np.arange(L)[:, None] + (S - L) - np.arange(S)
LOCAL = np.arange(L)[:, None] - np.arange(S)
TILES = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)
PATTERNS = {
    "full": ({}, np.ones((L, S), bool)),
    "causal": ({"causal": True}, DISTANCE >= 0),
    "windowed": ({"causal": True, "window": 9}, (DISTANCE >= 0) & (DISTANCE < 9)),
    "both sides": ({"window": 9}, np.abs(LOCAL) < 9),
    "blocks": (
        {"block_mask": TILES},
        np.kron(TILES, np.ones((16, 16), bool))[:L, :S].astype(bool),
    ),
}


@pytest.mark.parametrize("use_flash", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_attention(make, rng, name, use_flash):
    attrs, seen = PATTERNS[name]
    arrays = [rng.standard_normal((2, n, 8)).astype(np.float32) for n in (L, S, S)]
    held = [make(x) for x in arrays]
    found = flash_attention(*held, **attrs, block_size=16, use_flash=use_flash)
    assert type(found) is type(held[0])
    assert off(found, attention(*arrays, seen)) < 1e-5


def test_attention_masks(make, rng):
    q, k, v = (rng.standard_normal((2, 3, n, 8)).astype(np.float32) for n in (L, S, S))
    seen = rng.random((L, S)) < 0.3
    seen[5] = False
    added = rng.standard_normal((3, 1, S)).astype(np.float32)
    held = [make(x) for x in (q, k, v)]
    found = flash_attention(*held, mask=make(seen), block_size=16)
    assert off(found, attention(q, k, v, seen)) < 1e-5
    assert not np.asarray(found)[:, :, 5].any()
    found = flash_attention(*held, mask=make(added), block_size=16)
    assert off(found, attention(q, k, v, True, added)) < 1e-5


@pytest.mark.parametrize("window", [None, 20])
def test_grouped_heads(make, rng, window):
    q = rng.standard_normal((2, 6, L, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, S, 8)).astype(np.float32) for _ in "kv")
    seen = rng.random((6, 1, S)) < 0.7
    found = flash_attention(
        *map(make, (q, k, v)), mask=make(seen), causal=True, window=window,
        block_size=16,
    )  # fmt: skip
    reach = window or L + S
    near = (DISTANCE >= 0) & (reach > DISTANCE)
    exact = attention(q, k.repeat(3, 1), v.repeat(3, 1), seen & near)
    assert off(found, exact) < 1e-5
    with pytest.raises(KernelError, match="heads of queries may be a multiple"):
        flash_attention(*map(make, (q[:, :5], k, v)))


def test_a_wrong_mask_is_found(rng):
    q, k, v = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (L, S, S))
    found = flash_attention(q, k, v, causal=True)
    assert off(found, attention(q, k, v, DISTANCE >= 1)) > 1e-2


def test_attention_of_half_precision_is_computed_in_float32(rng):
    q, k, v = (rng.standard_normal((1, 64, 8)).astype(np.float16) for _ in range(3))
    found = flash_attention(q, k, v, block_size=16)
    assert found.dtype == np.float16
    exact = attention(q, k, v, True)
    assert (
        np.abs(found - exact).max()
        <= np.spacing(np.abs(exact).astype(np.float16)).max()
    )


# Largest error of each precision, relative to sums of 96 products: a few half units.
PRECISIONS = {
    "default": (0, 1e-6), "bfloat16": (1e-4, 4e-3), "float16": (1e-5, 5e-4),
    "float8_e4m3fn": (3e-3, 6e-2), "highest": (0, 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gemm(make, rng, precision):
    a = rng.standard_normal((2, 40, 96)).astype(np.float32)
    b = rng.standard_normal((96, 24)).astype(np.float32)
    exact = a.astype(np.float64) @ b
    low, high = PRECISIONS[precision]
    for size in (None, 32, 33):
        found = gemm(make(a), make(b), precision=precision, block_size=size)
        assert low <= off(found, exact) < high


def test_gemm_flags(make, rng):
    a, b = (rng.standard_normal((32, 32)).astype(np.float32) for _ in range(2))
    x, y = make(a), make(b)
    assert (gemm(x, y, use_bfloat16=True) == gemm(x, y, precision="bfloat16")).all()
    assert (gemm(x, y, use_fp16=True) == gemm(x, y, precision="float16")).all()
    assert (gemm(x, y, use_bfloat16=True) != gemm(x, y)).any()


def test_rounding_equals_the_formats(make):
    x = np.concatenate([
        np.linspace(-500, 500, 4001), np.linspace(-0.1, 0.1, 4001),
        2.0 ** np.arange(-14, 9), [17, 19, 21, 0.001953125 / 2, -0.0],
    ]).astype(np.float32)  # fmt: skip
    found = np.asarray(rounded(make(x), "float8_e4m3fn"))
    if importlib.util.find_spec("ml_dtypes"):
        outside = importlib.import_module("ml_dtypes").float8_e4m3fn
        exact = np.clip(x, -448, 448).astype(outside).astype(np.float32)
        assert np.array_equal(found, exact)
    assert len(np.unique(np.abs(found))) <= 127
    assert np.abs(found).max() == 448
    half = np.asarray(rounded(make(x), "float16"))
    assert np.array_equal(half, x.astype(np.float16).astype(np.float32))
    bits = np.asarray(rounded(make(x), "bfloat16")).view(np.uint32)
    assert not (bits & 0xFFFF).any()


@pytest.mark.parametrize("fused", [True, False])
def test_layer_norm(make, rng, fused):
    x = 3 + rng.standard_normal((5, 7, 33)).astype(np.float32)
    w, b = rng.standard_normal((2, 33)).astype(np.float32)
    mean, spread = (
        x.mean(-1, keepdims=True),
        x.astype(np.float64).var(-1, keepdims=True),
    )
    exact = (x - mean) / np.sqrt(spread + 1e-5)
    held = [make(each) for each in (x, w, b)]
    with profile_kernel() as profile:
        found = layer_norm(*held, use_fused_ops=fused)
        plain = layer_norm(held[0], use_fused_ops=fused)
    assert off(found, exact * w + b) < 1e-5
    assert off(plain, exact) < 1e-5
    has_one = not isinstance(held[0], np.ndarray)
    kind = "fused" if fused and has_one else "formula"
    assert {event.name for event in profile.events} == {f"layer_norm/{kind}"}


def test_rope(make, rng):
    x = rng.standard_normal((2, 9, 8)).astype(np.float32)
    cos, sin = create_rope_cache(12, 8, theta=500.0, array=make(x))
    found = np.asarray(apply_rope(make(x), cos, sin))
    angles = np.arange(9)[:, None] * 500.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    assert off(found, np.concatenate([turned.real, turned.imag], -1)) < 1e-6
    with pytest.raises(KernelError, match="at least L rows"):
        apply_rope(make(x), cos[:8], sin[:8])


def sparse_operands(rng, density, blocks=8, size=16):
    count = round(density * blocks * blocks)
    chosen = np.sort(rng.choice(blocks * blocks, count, replace=False))
    indices = np.stack([chosen // blocks, chosen % blocks], 1)
    values = rng.standard_normal((count, size, size)).astype(np.float32)
    matrix = np.zeros((blocks * size, blocks * size))
    for (row, column), block in zip(indices, values, strict=True):
        matrix[row * size :, column * size :][:size, :size] = block
    return values, indices, matrix


@pytest.mark.parametrize("density", [0.05, 0.25, 1.0])
def test_block_sparse_matmul(make, rng, density):
    values, indices, matrix = sparse_operands(rng, density)
    x = rng.standard_normal((3, 5, 128)).astype(np.float32)
    found = block_sparse_matmul(make(x), make(values), indices, columns=128)
    assert off(found, x @ matrix) < 1e-5


def test_block_sparse_products_of_numpy_share_one_buffer(rng):
    values, indices, matrix = sparse_operands(rng, 0.25, size=128)
    x = rng.standard_normal((256, 1024)).astype(np.float32)
    tracemalloc.start()
    try:
        found = block_sparse_matmul(x, values, indices, columns=1024)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert off(found, x @ matrix) < 1e-5
    most = np.bincount(indices[:, 1]).max()
    operands = most * 128 * (256 + 128) * x.itemsize
    assert peak < found.nbytes + operands + 100_000


def test_block_sparse_indices_are_copied_to_the_device_once(rng, monkeypatch):
    torch = pytest.importorskip("torch")
    copies = []

    def counting(value, array):
        copies.append(value.shape)
        return like(value, array)

    monkeypatch.setattr(sparse, "like", counting)
    values, indices, matrix = sparse_operands(rng, 0.25)
    mixed = rng.permutation(len(indices))
    x = rng.standard_normal((5, 128)).astype(np.float32)
    found = block_sparse_matmul(
        torch.from_numpy(x), torch.from_numpy(values[mixed]), indices[mixed],
        columns=128,
    )  # fmt: skip
    assert off(found, x @ matrix) < 1e-5
    assert copies == [(len(indices),)] * 2


def test_work_follows_density(rng, monkeypatch):
    work, matmul = [], np.matmul

    def counting(a, b, **options):
        work.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return matmul(a, b, **options)

    monkeypatch.setattr(np, "matmul", counting)
    for density in (0.25, 0.5, 1.0):
        work.clear()
        values, indices, _ = sparse_operands(rng, density)
        block_sparse_matmul(np.ones((4, 128), np.float32), values, indices, columns=128)
        assert sum(work) == density * 4 * 128 * 128
        q = rng.standard_normal((1, 64, 8))
        tiles = np.zeros((4, 4), bool)
        tiles[:, : int(4 * density)] = True
        work.clear()
        flash_attention(q, q, q, block_mask=tiles, block_size=16)
        assert sum(work) == density * 2 * 64 * 64 * 8


def test_refusals(rng):
    x = np.ones((4, 6), np.float32)
    for call, message in (
        (lambda: gemm(x, x), r"gemm: found \[4, 6\] and \[4, 6\]"),
        (lambda: layer_norm(x, x[0, :5]), r"scale: found \[5\], accepted: \[6\]"),
        (lambda: flash_attention(x, x, x[:3]), "flash_attention: found"),
        (lambda: flash_attention(x, x, x, window=0), "window: found 0"),
        (lambda: flash_attention(x, x, x, block_mask=[[1, 1]]), r"accepted: \[1, 1\]"),
        (lambda: KernelConfig(block_size=0), "block_size: found 0"),
        (lambda: KernelConfig(precision="half"), "precision: found 'half'"),
        (lambda: KernelConfig(use_fp16=True, use_bfloat16=True), "one of bfloat16"),
        (lambda: KernelConfig(fallback="cpu"), "fallback: found 'cpu'"),
        (lambda: tpu_kernel(blocks=1), "tpu_kernel: found blocks, accepted: block_s"),
        (lambda: sparse_kernel(platform="ipu"), "platform: found 'ipu'"),
        (lambda: create_rope_cache(4, 3), "an even number"),
        (
            lambda: block_sparse_matmul(x, x[None, :3, :3], [[2, 0]], columns=6),
            "different pairs below",
        ),
    ):
        with pytest.raises(KernelError, match=message):
            call()


def test_every_field_of_the_configuration_has_an_effect(make, rng):
    a, b = (make(rng.standard_normal((32, 32)).astype(np.float32)) for _ in range(2))

    def run(function, **fields):
        kernel = cpu_kernel(**fields, auto_optimize=False)(function)
        with profile_kernel() as profile:
            result = kernel(a, b)
        return np.asarray(result), [event.name for event in profile.events]

    plain, names = run(lambda a, b: gemm(a, b))
    assert names[0] == "gemm/default"
    for fields in (
        {"use_bfloat16": True}, {"use_fp16": True}, {"precision": "float8_e4m3fn"}
    ):  # fmt: skip
        changed, _ = run(lambda a, b: gemm(a, b), **fields)
        assert 0 < np.abs(changed - plain).max() < 2
    # 0.1 summed by ones is not 0.1 summed at once, in float32.
    blocks, _ = run(lambda a, b: gemm(a, b), block_size=1)
    assert 0 < np.abs(blocks - plain).max() < 1e-4
    for wanted, kind in ((True, "tiled"), (False, "plain")):
        _, names = run(
            lambda a, b: flash_attention(a, b, b), use_efficient_attention=wanted
        )
        assert names[0] == f"attention/{kind}"
    _, names = run(lambda a, b: layer_norm(a), use_fused_ops=False)
    assert names[0] == "layer_norm/formula"


def test_auto_optimize_compiles_for_jax(make):
    traced = []

    def body(x):
        traced.append(type(x).__name__)
        return x * 2

    x = make(np.ones(3, np.float32))
    if type(x).__module__ == "torch":
        pytest.skip("torch.compile takes half a minute")
    for wanted in (True, False):
        traced.clear()
        kernel = cpu_kernel(auto_optimize=wanted)(body)
        assert (
            np.asarray(kernel(x)).tolist() == np.asarray(kernel(x)).tolist() == [2] * 3
        )
        is_jax = type(x).__module__.startswith("jax")
        assert (len(traced) == 1) == (wanted and is_jax)


@pytest.mark.parametrize("decorator", [tpu_kernel, gpu_kernel])
def test_an_absent_device(make, decorator, caplog):
    if decorator(lambda x: x).why_not() is None:
        pytest.skip("the device is here")

    def double(x):
        return x * 2

    x = make(np.ones(3, np.float32))
    kernel = decorator(double)
    with caplog.at_level(logging.WARNING, "inl"):
        assert (
            np.asarray(kernel(x)).tolist() == np.asarray(kernel(x)).tolist() == [2] * 3
        )
    (record,) = caplog.records
    assert "pip install " in record.message or "not" in record.message
    strict = decorator(fallback="error")(double)
    with pytest.raises(BackendUnavailable, match="double: "):
        strict(x)
    assert issubclass(BackendUnavailable, DeviceError)


def test_tensor_cores_have_no_effect_without_a_gpu():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("the device is here")
    kernel = gpu_kernel(use_tensor_cores=True)(lambda x: x)
    kernel(torch.ones(2))
    assert any("use_tensor_cores has no effect" in note for note in kernel.notes)


def test_tensor_cores_are_used_inside_the_kernel_only(monkeypatch):
    torch = pytest.importorskip("torch")
    before, seen = torch.get_float32_matmul_precision(), []
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(decorators, "_devices", lambda *_: gpu)
    monkeypatch.setattr(decorators, "_moved", lambda value, _: value)

    def product(x):
        seen.append(torch.get_float32_matmul_precision())
        return x

    for wanted in (True, False):
        kernel = gpu_kernel(use_tensor_cores=wanted, auto_optimize=False)(product)
        kernel(torch.ones(2))
        assert torch.get_float32_matmul_precision() == before
    assert seen == ["high", before]


def test_kernels_without_a_result_and_of_other_experts():
    x, w = np.ones((2, 3)), np.ones((4, 3, 3))

    @tpu_kernel
    def nothing(x): ...

    with pytest.raises(KernelError, match="nothing: returned None"):
        nothing(x)

    @expert_kernel(platform="cpu", num_experts=8)
    def dispatch(inputs, expert_weights, capacity_factor=1.0):
        return inputs

    assert dispatch(x, np.ones((8, 3, 3))).shape == x.shape
    with pytest.raises(KernelError, match="found 4 experts, accepted: 8"):
        dispatch(x, w)


def test_profile(tmp_path):
    a = np.ones((8, 8), np.float32)

    @cpu_kernel
    def twice(a):
        return gemm(gemm(a, a), a)

    with profile_kernel() as profile:
        twice(a)
    gemm(a, a)
    assert [e.name for e in profile.events] == ["gemm/default"] * 2 + ["twice"]
    first, _, outer = profile.events
    assert 0 <= first.start - outer.start <= outer.seconds
    assert sum(e.seconds for e in profile.events[:2]) <= outer.seconds
    lines = profile.summary().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("twice")
    profile.save_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [row["name"] for row in rows] == [e.name for e in profile.events]
    if importlib.util.find_spec("matplotlib"):
        profile.save_picture(tmp_path / "profile.png")
        assert (tmp_path / "profile.png").stat().st_size > 1000


def test_gradients_of_torch(rng):
    torch = pytest.importorskip("torch")
    new = {"dtype": torch.float64, "requires_grad": True}
    q, k, v = (torch.randn(1, 5, 3, **new) for _ in range(3))

    def call(q, k, v):
        return flash_attention(q, k, v, causal=True, block_size=2)

    assert torch.autograd.gradcheck(call, (q, k, v))
    w = torch.randn(2, 3, 3, **new)
    x, b = torch.randn(4, 6, **new), torch.randn(3, **new)
    sparse_call = lambda x, w: block_sparse_matmul(x, w, [[0, 1], [1, 0]], columns=6)  # noqa: E731
    assert torch.autograd.gradcheck(sparse_call, (x, w))
    norm = lambda x, b: layer_norm(x, b, use_fused_ops=False)  # noqa: E731
    assert torch.autograd.gradcheck(norm, (q[0], b))


def test_gradients_of_jax(rng):
    jax = pytest.importorskip("jax")
    q = jax.numpy.asarray(rng.standard_normal((1, 6, 4)), "float32")

    def loss(q, size):
        return (flash_attention(q, q, q, causal=True, block_size=size) ** 2).sum()

    tiled, plain = (jax.jit(jax.grad(loss), static_argnums=1)(q, n) for n in (2, 6))
    assert off(tiled, np.asarray(plain)) < 1e-5
    assert np.asarray(
        jax.grad(lambda q: gemm(q, q[0].T, precision="float8_e4m3fn").sum())(q)
    ).any()
