"""Input precision of products with packed weights: int8 only where declared."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from inl.device import Device
from inl.dtypes import HostArray, rounded
from inl.ops import catalog
from inl.spec.activation_quant import INT8
from inl.spec.op import Case
from inl.spec.tolerance import judge
from inl.testing.check import CheckFailed
from inl.testing.packed_checks import packed_checks
from inl.testing.target import Target
from inl_cpu.abi import Flag
from inl_cpu.matrix import pack_rows
from inl_cpu.native_backend import NativeBackend

MLP = catalog()["gated_mlp"]
HIDDEN, INNER = 256, 512
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
ROWS = (1, 3, 12, 40)


def kernel_named(backend, label):
    return next(kernel for kernel in backend.kernels() if kernel.label == label)


class Mlp:
    """Random weights in one packing, and the kernels over them."""

    def __init__(self, backend, kind, rng, shapes=SHAPES):
        packing = gguf.GGMLQuantizationType[kind.upper()]
        self.backend, self.group, weights = backend, {}, {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape, np.float32) / shape[1] ** 0.5
            data = gguf.quants.quantize(values, packing)
            self.group[name] = HostArray(data, kind, shape)
            # The case has exact float32 values; only the kernel gets packed data.
            weights[name] = gguf.quants.dequantize(data, packing).astype(np.float32)
        self.weights = MLP.weights(**weights)

    def run(self, x, label="gated_mlp/native"):
        kernel = kernel_named(self.backend, label)
        packed = kernel.pack(self.group, self.backend, "bfloat16")
        return np.array(
            kernel.run(np.asarray(x, np.float32), packed, activation="silu")
        )

    def verdict(self, x, inputs):
        case = Case("mlp", (x, self.weights), {"activation": "silu"})
        return judge(MLP, case, "bfloat16", self.run(x), inputs)


@pytest.fixture(params=["q4_0", "q4_1", "q8_0"])
def mlp(backend, request, rng):
    return Mlp(backend, request.param, rng)


def inputs(rng, rows):
    x = rng.standard_normal((rows, HIDDEN))
    x[:, 7] *= 20  # an outlier channel, as in trained models
    return rounded(x, "bfloat16").astype(np.float64)


@pytest.mark.parametrize("rows", ROWS)
def test_int16_inputs_meet_the_bfloat16_tolerance(mlp, rng, rows, monkeypatch):
    monkeypatch.setenv("INL_CPU_INPUTS", "int16")
    verdict = mlp.verdict(inputs(rng, rows), "")
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("rows", ROWS)
def test_int8_inputs_meet_their_declared_tolerance(mlp, rng, rows):
    kernel = kernel_named(mlp.backend, "gated_mlp/native")
    assert kernel.activation_quant == INT8
    verdict = mlp.verdict(inputs(rng, rows), kernel.activation_quant)
    assert verdict.passed, str(verdict)


WIDE = 1024
"""Least rows and columns of matrices that are requantized."""
MANY = 80


def wide_mlp(backend, kind, rng, size=WIDE):
    shapes = {"gate": (size, size), "up": (size, size), "down": (size, size)}
    return Mlp(backend, kind, rng, shapes)


@pytest.mark.parametrize("kind", ["q4_0", "q5_1"])
def test_requantized_products_meet_the_declared_tolerance(backend, rng, kind):
    mlp = wide_mlp(backend, kind, rng)
    x = rng.standard_normal((MANY, WIDE))
    x[:, 7] *= 20
    x = rounded(x, "bfloat16").astype(np.float64)
    verdict = mlp.verdict(x, INT8)
    assert verdict.passed, str(verdict)
    alone = np.concatenate([mlp.run(row[None]) for row in x])
    rounds_batches = backend.emitter.machine.isa in ("avx512", "amx")
    assert np.array_equal(mlp.run(x), alone) != rounds_batches


def test_the_kernel_says_that_it_requantizes(backend, monkeypatch):
    requantizes = backend.emitter.machine.isa == "avx512"
    for label, mode, says in (
        ("linear/native", "int8", requantizes),
        ("linear/native", "int16", False),
        ("linear/native_rows", "int8", False),
    ):
        monkeypatch.setenv("INL_CPU_INPUTS", mode)
        note = kernel_named(backend, label).note
        assert ("rounded to int8" in note) == says == bool(note)


@pytest.mark.parametrize(
    ("kind", "size", "mode"),
    [("q8_0", WIDE, "int8"), ("q4_0", WIDE - 32, "int8"), ("q4_0", WIDE, "int16")],
)
def test_other_products_have_the_bits_of_single_rows(
    backend, rng, monkeypatch, kind, size, mode
):
    """8-bit codes, small matrices, and int16 inputs are not requantized."""
    monkeypatch.setenv("INL_CPU_INPUTS", mode)
    if backend.emitter.machine.isa == "amx":
        pytest.skip("AMX computes many rows in bfloat16")
    mlp = wide_mlp(backend, kind, rng, size)
    x = rng.standard_normal((MANY, size))
    alone = np.concatenate([mlp.run(row[None]) for row in x[:3]])
    assert np.array_equal(mlp.run(x)[:3], alone)


def test_int8_is_coarser_than_int16(mlp, rng, monkeypatch):
    """Otherwise the two tests above would not distinguish the modes."""
    x = inputs(rng, 40)
    eight, invariant = mlp.run(x), mlp.run(x, "gated_mlp/native_rows")
    monkeypatch.setenv("INL_CPU_INPUTS", "int16")
    sixteen = mlp.run(x)
    assert np.abs(invariant - sixteen).max() == 0
    assert np.abs(eight - sixteen).max() > 1e-3 * np.abs(sixteen).max()


def test_invariant_kernels_are_independent_of_the_batch(mlp, rng):
    kernel = kernel_named(mlp.backend, "gated_mlp/native_rows")
    assert kernel.invariant
    assert kernel.activation_quant == ""
    x = inputs(rng, 40)
    together = mlp.run(x, "gated_mlp/native_rows")
    alone = np.concatenate([mlp.run(row[None], kernel.label) for row in x])
    assert np.array_equal(together, alone)


QUANTIZING = {"linear", "qkv_linear", "gated_mlp", "experts"}


@pytest.mark.parametrize(
    ("requested", "coarse"),
    [("", QUANTIZING), ("int16", set()), ("int8", QUANTIZING)],
)
def test_declared_precision_follows_the_variable(
    backend, monkeypatch, requested, coarse
):
    monkeypatch.setenv("INL_CPU_INPUTS", requested)
    declared = {k.op for k in backend.kernels() if k.activation_quant}
    assert declared == coarse


def test_float32_and_plain_weights_never_use_int8(backend):
    plain = HostArray(np.zeros((16, 64), np.float32), "float32", (16, 64))
    packed = HostArray(np.zeros((16, 68), np.uint8), "q8_0", (16, 64))
    coarse = [
        (source.dtype, dtype)
        for source in (plain, packed)
        for dtype in ("float32", "bfloat16")
        if pack_rows([source], dtype, backend.emitter)[0].inputs.default == Flag.X_INT8
    ]
    assert coarse == [("q8_0", "bfloat16")]


def packed_failures(monkeypatch, change):
    """Checks of packed weights that fail once each kernel is ``change(kernel)``."""
    sound = NativeBackend.kernels
    monkeypatch.setattr(
        NativeBackend, "kernels", lambda self: [change(k) for k in sound(self)]
    )
    target = Target(Device("cpu"), seed=1)
    checks = list(packed_checks(target, MLP, "bfloat16"))
    assert len(checks) == 4

    def fails(check):
        try:
            check.run()
        except CheckFailed:
            return True
        return False

    return [check.name.split("/")[2] for check in checks if fails(check)]


def test_the_contract_detects_coarse_inputs(monkeypatch):
    def six_bits(kernel):
        def run(x, *rest, **attrs):
            unit = np.abs(x).max() / 31
            return kernel.run(np.rint(x / unit) * unit, *rest, **attrs)

        return replace(kernel, run=run) if kernel.op == "gated_mlp" else kernel

    assert packed_failures(monkeypatch, lambda kernel: kernel) == []
    assert packed_failures(monkeypatch, six_bits) == ["1", "5", "33", "130"]
