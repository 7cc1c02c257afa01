"""The sweep of the functions on arrays finds results that are wrong."""

from __future__ import annotations

import sys

import pytest
import toolkit

import inl
import inl_toolkit.kernels as kernels
from inl_toolkit.kernels import dense

torch = pytest.importorskip("torch")
quantized = pytest.importorskip("inl_torch.registered.quantized")


def sweep(monkeypatch, capfd, *only: str) -> tuple[int, str]:
    words = ["--only", *only, "--rows", "3", "--lengths", "48", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["toolkit.py", *words])
    monkeypatch.setattr(toolkit, "WIDTH", 64)
    monkeypatch.setattr(toolkit, "LAYER", 96)
    status = toolkit.main()
    return status, capfd.readouterr().out


def test_right_results_pass(monkeypatch, capfd):
    status, text = sweep(
        monkeypatch, capfd, "gemm", "attention", "norm", "dynamics", "quantized"
    )
    assert status == 0, text
    assert "0 wrong, 0 failed" in text
    assert sum(" s" in line for line in text.splitlines()) >= 5 + 9 + 1 + 2 + 28


def coarser(x, dtype, true=dense.rounded):
    return true(x, "bfloat16" if dtype == "float16" else dtype)


def without_last(xp, x, y, config, true=dense.product):
    return true(xp, x[..., :-1], y[..., :-1, :], config)


def off_scale(*args, true=kernels.flash_attention, **kwargs):
    return true(*args, scale=0.1251, **kwargs)


def large_eps(*args, true=kernels.layer_norm):
    return true(*args, eps=1e-4)


def off_step(*args, true=inl.inl_dynamics):
    return true(*args, dt=0.1 * (1 + 1e-4))


def without_first(*args, true=quantized.decoded):
    weight = true(*args).clone()
    weight[:, 0] = 0
    return weight


FAULTS = {
    "gemm in bfloat16 for float16": ("gemm", dense, "rounded", coarser),
    "a product without its last term": ("gemm", dense, "product", without_last),
    "attention of another scale": ("attention", kernels, "flash_attention", off_scale),
    "a norm of another eps": ("norm", kernels, "layer_norm", large_eps),
    "dynamics of another step": ("dynamics", inl, "inl_dynamics", off_step),
    "a layer without an input": ("quantized", quantized, "decoded", without_first),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, capfd, name):
    group, owner, attribute, fault = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    status, text = sweep(monkeypatch, capfd, group)
    assert status == 1, text
    assert "WRONG: error" in text
