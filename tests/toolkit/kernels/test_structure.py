"""What a decorated function traces, and what stays a constant of its program."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from inl.errors import DeviceError, KernelError, OutOfMemory
from inl.functional import moe
from inl.kernels import (
    block_sparse_matmul,
    cpu_kernel,
    decorators,
    expert_kernel,
    flash_attention,
    gemm,
    gpu_kernel,
    sparse_kernel,
    tpu_kernel,
)
from inl.nn import Linear, Tensor
from inl.optimizers import to_tiles
from inl_toolkit.kernels.compiling import KEPT

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy
MAKE = {"numpy": np.asarray, "torch": torch.asarray, "jax": jnp.asarray}
RNG = np.random.default_rng(5)
DENSE = RNG.standard_normal((4, 8)).astype(np.float32)
VALUES = RNG.standard_normal((2, 4, 4)).astype(np.float32)
PAIRS = [[0, 1], [1, 0]]
MATRIX = np.zeros((8, 8), np.float32)
MATRIX[:4, 4:], MATRIX[4:, :4] = VALUES
INDICES = {
    "jax": jnp.asarray, "numpy": np.asarray, "list": list, "torch": torch.asarray,
}  # fmt: skip


def fields(decorator, kind):
    """Without torch.compile, which takes half a minute."""
    platform = {} if decorator not in (sparse_kernel, expert_kernel) else {
        "platform": "tpu" if kind == "jax" else "cpu"
    }  # fmt: skip
    return {"auto_optimize": kind == "jax", **platform}


@pytest.mark.parametrize("form", INDICES)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    "decorator", [sparse_kernel, expert_kernel, tpu_kernel, gpu_kernel, cpu_kernel]
)
def test_indices_are_read(decorator, kind, form):
    if form in ("jax", "torch") and form != kind:
        pytest.skip("another framework")

    @decorator(**fields(decorator, kind))
    def product(dense, values, indices, columns=8):
        return block_sparse_matmul(dense, values, indices, columns=columns)

    dense, values, indices = (
        MAKE[kind](DENSE), MAKE[kind](VALUES), INDICES[form](PAIRS)
    )  # fmt: skip
    for found in (
        product(dense, values, indices),
        product(dense, values, indices=indices, columns=8),
    ):
        np.testing.assert_allclose(np.asarray(found), DENSE @ MATRIX, atol=1e-5)
    # Others are another program, not the one before.
    turned = INDICES[form]([[1, 0], [0, 1]])
    right = np.concatenate([DENSE[:, 4:] @ VALUES[0], DENSE[:, :4] @ VALUES[1]], 1)
    np.testing.assert_allclose(
        np.asarray(product(dense, values, turned)), right, atol=1e-5
    )
    assert not any("uncompiled" in note for note in product.notes)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    "decorator", [sparse_kernel, expert_kernel, tpu_kernel, gpu_kernel, cpu_kernel]
)
def test_numbers_select_what_is_computed(decorator, kind):
    """Each is a value that the function branches on, and that its kernels check."""

    @decorator(**fields(decorator, kind))
    def run(x, weights, size, factor=1.0, *, sizes=(2, 4), name="none", flags=None):
        y = flash_attention(x, x, x, block_size=size, causal=flags["causal"])
        if factor > 1 and name == "scaled" and sizes[1] == 4:
            y = y * factor
        return gemm(y, weights, block_size=sizes[0])

    x, w = MAKE[kind](DENSE), MAKE[kind](MATRIX)
    plain = run(x, w, 2, flags={"causal": True})
    scaled = run(x, w, 2, 3.0, name="scaled", flags={"causal": True})
    np.testing.assert_allclose(np.asarray(scaled), 3 * np.asarray(plain), rtol=1e-5)
    whole = run(x, w, 2, flags={"causal": False})
    assert np.abs(np.asarray(whole) - np.asarray(plain)).max() > 1e-3


@pytest.mark.parametrize("kind", MAKE)
def test_capacity_is_an_argument_of_an_expert_kernel(kind):
    @expert_kernel(**fields(expert_kernel, kind), num_experts=2)
    def dispatch(inputs, expert_weights, logits, capacity_factor=1.0):
        return moe.moe_dispatch(
            inputs, logits, expert_weights, k=1, capacity_factor=capacity_factor
        )

    logits = np.array([[1, 0], [2, 0], [3, 0], [0, 1]], np.float32)
    x, w = DENSE, RNG.standard_normal((2, 3, 8)).astype(np.float32)
    full = np.stack([w[i] @ row for i, row in zip((0, 0, 0, 1), x, strict=True)])
    made = [MAKE[kind](each) for each in (x, w, logits)]
    np.testing.assert_allclose(
        np.asarray(dispatch(*made, 2.0)), full, rtol=1e-5, atol=1e-6
    )
    dropped = full * np.array([[1], [1], [0], [1]])  # floor(4 * 1.0 / 2) tokens each
    np.testing.assert_allclose(
        np.asarray(dispatch(*made, capacity_factor=1.0)), dropped, rtol=1e-5, atol=1e-6
    )


def test_programs_are_kept_by_their_constants():
    traced = []

    @tpu_kernel
    def add(x, number, *, flag=False):
        traced.append((number, flag))
        return x + number if not flag else x - number

    x = jnp.asarray(DENSE)
    for number in (1, 1.0, True, 1, 0.0, -0.0):
        add(x, number)
    assert [repr(number) for number, _ in traced] == ["1", "1.0", "True", "0.0", "-0.0"]
    add(x[:2], 1)
    assert len(traced) == 6  # another shape
    for number in range(2 * KEPT):
        add(x, number)
    programs = add.compiled["jax"].programs
    assert len(programs) == KEPT
    assert any(f"more than {KEPT} values" in note for note in add.notes)


def test_what_reads_values_of_numbers_runs_uncompiled_and_says_so():
    @tpu_kernel
    def clipped(x):
        return x / x.max() if x.max() > 1 else x

    x = jnp.asarray([1.0, 4.0])
    for _ in range(2):
        assert clipped(x).tolist() == [0.25, 1.0]
    assert sum("uncompiled" in note for note in clipped.notes) == 1

    def first(x):
        return x if x[0] > 0 else -x

    other = tpu_kernel(first)
    with pytest.raises(KernelError, match=r"^first: reads values of arrays that JAX"):
        jax.jit(other)(x)
    assert other(x).tolist() == x.tolist()


def test_a_constant_without_a_hash():
    kernel = tpu_kernel(lambda x, part: x * part["one"].value)
    part = {"one": SimpleNamespace(value=3)}
    for value in (3, 4):
        part["one"].value = value
        assert kernel(jnp.ones(2), part).tolist() == [value, value]


def test_gradients_beside_constants():
    @sparse_kernel(platform="tpu")
    def product(dense, values, indices):
        return block_sparse_matmul(dense, values, indices, columns=8)

    indices = jnp.asarray(PAIRS)

    def loss(dense, values):
        return product(dense, values, indices).sum()

    dense, values = jnp.asarray(DENSE), jnp.asarray(VALUES)
    for grad in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        of_dense, of_values = grad(dense, values)
        np.testing.assert_allclose(
            of_dense, np.tile(MATRIX.sum(1), (4, 1)), rtol=1e-4, atol=1e-5
        )
        right = np.tile(DENSE.sum(0)[:4, None], (1, 4))
        np.testing.assert_allclose(of_values[0], right, rtol=1e-4, atol=1e-5)


def test_arrays_of_numpy_stay_beside_tensors_that_move(monkeypatch):
    monkeypatch.setattr(decorators, "_devices", lambda *_: torch.device("meta"))

    @sparse_kernel(platform="gpu", auto_optimize=False)
    def places(dense, values, indices, others):
        return [x.device.type if hasattr(x, "cpu") else "host" for x in
                (dense, values, indices, others)]  # fmt: skip

    found = places(
        torch.asarray(DENSE), torch.asarray(VALUES), torch.asarray(PAIRS), DENSE
    )
    assert found == ["meta", "meta", "cpu", "host"]


def test_arguments_of_two_frameworks():
    kernel = cpu_kernel(lambda x, y: x)
    with pytest.raises(KernelError, match="found arrays of jax and torch, accepted"):
        kernel(jnp.ones(2), torch.ones(2))
    for kernel in (sparse_kernel(lambda x, y: x), expert_kernel(lambda x, y: x)):
        with pytest.raises(KernelError, match="found int, accepted: an array, or"):
            kernel(DENSE, 3)


HUGE = 1 << 42
"""Rows of an array that no memory holds, as a broadcast of one row."""


def spread(kind):
    """An array of few bytes, whose results would take terabytes."""
    if kind == "torch":
        return torch.ones(1, 8).expand(HUGE, 8)
    return np.broadcast_to(np.ones((1, 8), np.float32), (HUGE, 8))


OUT = {
    "decorated numpy": lambda: cpu_kernel(lambda x: x + 1)(spread("numpy")),
    "decorated torch": lambda: gpu_kernel(lambda x: x + 1)(spread("torch")),
    "decorated jax": lambda: tpu_kernel(lambda x: jnp.zeros((1 << 20, 1 << 20, 8)) + x)(
        jnp.ones(1)
    ),
    "not compiled": lambda: tpu_kernel(auto_optimize=False)(
        lambda x: jnp.zeros((1 << 20, 1 << 20, 8)) + x
    )(jnp.ones(1)),
    "gemm": lambda: gemm(spread("torch"), torch.ones(8, 8)),
    "gemm of NumPy": lambda: gemm(spread("numpy"), np.ones((8, 8), np.float32)),
    "attention": lambda: flash_attention(*[spread("torch")] * 3),
    "attention of NumPy": lambda: flash_attention(*[spread("numpy")] * 3),
    "sparse": lambda: block_sparse_matmul(
        spread("torch"), torch.ones(1, 8, 8), [[0, 0]], columns=8
    ),
    "tiles": lambda: to_tiles(np.ones((1, 1, 1, 1), np.float32), tile=1 << 25),
    "tensor": lambda: Tensor(spread("numpy"), "cpu"),
    "reshaped": lambda: Tensor([1.0], "cpu").broadcast_to(HUGE) + 1,
    "layer": lambda: Linear(1 << 21, 1 << 21),
}


@pytest.mark.parametrize("name", OUT)
def test_what_does_not_fit_is_out_of_memory(name):
    with pytest.raises(OutOfMemory, match=r"(does|do) not fit") as caught:
        OUT[name]()
    assert isinstance(caught.value, DeviceError)
    assert caught.value.__cause__ is not None


def test_other_errors_stay():
    def broken(x):
        raise RuntimeError("a bug in the function")

    for kind, make in MAKE.items():
        with pytest.raises(RuntimeError, match="a bug in the function"):
            tpu_kernel(broken)(make(DENSE))
        assert kind


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("decorator", [tpu_kernel, gpu_kernel, cpu_kernel])
def test_tensor_cores_take_effect_or_are_noted(kind, decorator):
    if torch.cuda.is_available() or jax.default_backend() == "gpu":
        pytest.skip("a GPU is here")
    kernel = decorator(use_tensor_cores=True, auto_optimize=False)(lambda x: x * 1)
    kernel(MAKE[kind](DENSE))
    assert "use_tensor_cores has no effect without an NVIDIA GPU" in kernel.notes
    assert decorator(lambda x: x * 1).notes == []


def test_tensor_cores_of_jax(monkeypatch):
    monkeypatch.setattr(decorators, "_on_nvidia", lambda *_: True)
    kernel = gpu_kernel(use_tensor_cores=True)(lambda x: x @ x.T)
    before = jax.config.jax_default_matmul_precision
    program = str(jax.make_jaxpr(kernel)(jnp.asarray(DENSE)))
    assert "Precision.HIGH)" in program  # JAX's other name of "tensorfloat32"
    plain = gpu_kernel(lambda x: x @ x.T)
    assert "Precision" not in str(jax.make_jaxpr(plain)(jnp.asarray(DENSE)))
    assert jax.config.jax_default_matmul_precision == before
