"""How products of packed weights hold their inputs: eight bits only where declared."""

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

    def __init__(self, backend, kind, rng):
        packing = gguf.GGMLQuantizationType[kind.upper()]
        self.backend, self.group, weights = backend, {}, {}
        for name, shape in SHAPES.items():
            values = rng.standard_normal(shape, np.float32) / shape[1] ** 0.5
            data = gguf.quants.quantize(values, packing)
            self.group[name] = HostArray(data, kind, shape)
            # float32 in a case is no storage: it stays as the file has it.
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
    x[:, 7] *= 20  # as trained models have it: one channel is far larger
    return rounded(x, "bfloat16").astype(np.float64)


@pytest.mark.parametrize("rows", ROWS)
def test_the_careful_way_keeps_the_rule_of_bfloat16(mlp, rng, rows, monkeypatch):
    monkeypatch.setenv("INL_CPU_INPUTS", "int16")
    verdict = mlp.verdict(inputs(rng, rows), "")
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("rows", ROWS)
def test_the_default_keeps_the_rule_of_what_it_declares(mlp, rng, rows):
    kernel = kernel_named(mlp.backend, "gated_mlp/native")
    assert kernel.activation_quant == INT8
    verdict = mlp.verdict(inputs(rng, rows), kernel.activation_quant)
    assert verdict.passed, str(verdict)


def test_eight_bits_are_coarser_than_sixteen(mlp, rng, monkeypatch):
    """Else the two tests above would tell nothing apart."""
    x = inputs(rng, 40)
    eight, invariant = mlp.run(x), mlp.run(x, "gated_mlp/native_rows")
    monkeypatch.setenv("INL_CPU_INPUTS", "int16")
    sixteen = mlp.run(x)
    assert np.abs(invariant - sixteen).max() == 0
    assert np.abs(eight - sixteen).max() > 1e-3 * np.abs(sixteen).max()


def test_invariant_kernels_declare_nothing_and_give_a_row_its_bits(mlp, rng):
    kernel = kernel_named(mlp.backend, "gated_mlp/native_rows")
    assert kernel.invariant
    assert kernel.activation_quant == ""
    x = inputs(rng, 40)
    together = mlp.run(x, "gated_mlp/native_rows")
    alone = np.concatenate([mlp.run(row[None], kernel.label) for row in x])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize(
    ("asked", "coarse"),
    [("", {"linear", "qkv_linear", "gated_mlp"}), ("int16", set()),
     ("int8", {"linear", "qkv_linear", "gated_mlp"})],
)  # fmt: skip
def test_what_kernels_declare_follows_what_was_asked_for(
    backend, monkeypatch, asked, coarse
):
    monkeypatch.setenv("INL_CPU_INPUTS", asked)
    declared = {k.op for k in backend.kernels() if k.activation_quant}
    assert declared == coarse


def test_float32_and_plain_weights_are_never_coarse(backend):
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
    assert len(checks) == 3

    def fails(check):
        try:
            check.run()
        except CheckFailed:
            return True
        return False

    return [check.name.split("/")[2] for check in checks if fails(check)]


def test_the_contract_covers_packed_weights_and_can_fail(monkeypatch):
    def six_bits(kernel):
        def run(x, *rest, **attrs):
            unit = np.abs(x).max() / 31
            return kernel.run(np.rint(x / unit) * unit, *rest, **attrs)

        return replace(kernel, run=run) if kernel.op == "gated_mlp" else kernel

    assert packed_failures(monkeypatch, lambda kernel: kernel) == []
    assert packed_failures(monkeypatch, six_bits) == ["1", "5", "33"]
