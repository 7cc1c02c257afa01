"""What users of the kernels pass by mistake, and what their functions may take."""

from __future__ import annotations

import numpy as np
import pytest

from inl.errors import KernelError, RequestError
from inl.kernels import (
    KernelConfig,
    cpu_kernel,
    expert_kernel,
    flash_attention,
    gemm,
    gpu_kernel,
    layer_norm,
    moe_dispatch,
    sparse_kernel,
    tpu_kernel,
)
from inl.kernels.tpu import TPUAttentionKernel, TPUGEMMKernel

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
MAKE = {"numpy": np.asarray, "torch": torch.asarray, "jax": jax.numpy.asarray}
A = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
SEEN = np.tril(np.ones((4, 4), bool))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: gemm([[1.0]], x), "gemm: a: found list, accepted: an array of"),
        (lambda x: gemm(x, None), r"gemm: b: found NoneType"),
        (lambda x: flash_attention(x, x, x, mask=x[0, :3, :3]), r"mask: found float32 "
         r"\[3, 3\], accepted: .* broadcast to \[3, 4, 4\]"),
        (lambda x: flash_attention(x, x, x, mask=SEEN.astype(int)), "mask: found int"),
        (lambda x: flash_attention(x, x, 3.0), "value: found float, accepted"),
        (lambda x: layer_norm(x, 2.0), "scale: found float"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(kind, call, message):
    with pytest.raises(KernelError, match=message):
        call(MAKE[kind](A))


@pytest.mark.parametrize("kind", MAKE)
def test_integers_have_no_attention_and_no_norm(kind):
    x = MAKE[kind](np.ones((4, 4), np.int32))
    for call in (lambda: flash_attention(x, x, x), lambda: layer_norm(x)):
        with pytest.raises(KernelError, match="found int32, accepted: floating"):
            call()
    np.testing.assert_array_equal(np.asarray(gemm(x, x)), np.full((4, 4), 4))


def test_arrays_of_two_frameworks():
    with pytest.raises(KernelError, match="a of numpy, b of torch; accepted: arr"):
        gemm(A, torch.asarray(A))
    with pytest.raises(KernelError, match="query of torch, key of jax"):
        flash_attention(torch.asarray(A), jax.numpy.asarray(A), torch.asarray(A))


@pytest.mark.parametrize("kind", MAKE)
def test_a_mask_of_numpy_fits_every_framework(kind):
    x, own = MAKE[kind](A), MAKE[kind](SEEN)
    expected = np.asarray(flash_attention(x, x, x, mask=own))
    found = np.asarray(flash_attention(x, x, x, mask=SEEN))
    np.testing.assert_array_equal(found, expected)
    causal = np.asarray(flash_attention(x, x, x, causal=True))
    np.testing.assert_allclose(found, causal, rtol=1e-5)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("k", [0, 4, 5])
def test_more_experts_than_there_are(kind, k):
    x, routes, experts = (MAKE[kind](each) for each in (A[0], A[0, :, :3], A))
    with pytest.raises(RequestError, match=f"k: found {k}, accepted: 1 to 3"):
        moe_dispatch(x, routes, experts, k=k)


def test_settings():
    with pytest.raises(KernelError, match="found 'use_bfloat16, use_fp16', accepted"):
        KernelConfig(use_bfloat16=True, use_fp16=True)
    with pytest.raises(KernelError, match="TPUGEMMKernel: found tile, accepted"):
        TPUGEMMKernel(tile=3)
    with pytest.raises(KernelError, match="found 'yes', accepted: True or False"):
        TPUAttentionKernel(use_flash="yes")
    with pytest.raises(KernelError, match="config: found str, accepted: KernelConfig"):
        tpu_kernel(config="fast")


@pytest.mark.parametrize("decorator", [sparse_kernel, expert_kernel])
def test_functions_of_two_arrays_are_decorated(decorator):
    for wrong in (3, lambda x: x):
        with pytest.raises(KernelError, match="accepted: a function of two arrays"):
            decorator(wrong)
    with pytest.raises(KernelError, match="platform: found 'npu'"):
        decorator(platform="npu")

    @decorator
    def product(inputs, weights, scale=1.0):
        return inputs @ weights * scale

    found = product(A[0], weights=A, scale=2.0)
    np.testing.assert_allclose(found, 2 * (A[0] @ A), rtol=1e-6)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("decorator", [tpu_kernel, gpu_kernel, cpu_kernel])
def test_methods_flags_and_names(kind, decorator):
    class Layer:
        def __init__(self, factor):
            self.factor = factor

        # torch.compile takes half a minute on the CPU.
        @decorator(auto_optimize=kind != "torch")
        def run(self, x, negate, *, mode="plain"):
            y = -x if negate else x
            return y * self.factor if mode == "scaled" else y

    x = MAKE[kind](A)
    for factor in (2.0, 3.0):
        layer = Layer(factor)
        for negate in (True, False):
            sign = -1 if negate else 1
            found = np.asarray(layer.run(x, negate, mode="scaled"))
            np.testing.assert_allclose(found, sign * factor * A)
            np.testing.assert_allclose(np.asarray(layer.run(x, negate)), sign * A)


@pytest.mark.parametrize("decorator", [tpu_kernel, gpu_kernel, cpu_kernel])
def test_gradients_through_a_kernel(decorator):
    kernel = decorator(lambda x: (x * x).sum())
    for gradient in (jax.grad(kernel), jax.jit(jax.grad(kernel))):
        np.testing.assert_allclose(gradient(jax.numpy.asarray(A)), 2 * A)
    x = torch.tensor(A, requires_grad=True)
    decorator(auto_optimize=False)(kernel.function)(x).backward()
    np.testing.assert_allclose(x.grad, 2 * A)
