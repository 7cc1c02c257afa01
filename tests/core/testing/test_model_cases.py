"""``inl check DEVICE --model``: the ops of a model's steps, with its sizes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from inl.backend.reference import body_kernel
from inl.device import Device
from inl.dtypes import wrap
from inl.executor.model_loader import read_model
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.weights import in_layout
from inl.testing.check import perform
from inl.testing.conformance import check_all, checks_of
from inl.testing.findings import findings
from inl.testing.packed_checks import q8_0
from inl.testing.target import Target
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from planted_kernels import target_of, with_fault

HEADS, KV_HEADS, DIM, HIDDEN, INNER = 9, 3, 12, 60, 104


@pytest.fixture(scope="module")
def language():
    """A model with numbers of heads, lanes and rows that no case of an op has."""
    config, tensors = tiny_llama(
        np.random.default_rng(3), layers=3, hidden=HIDDEN, heads=HEADS,
        kv_heads=KV_HEADS, head_dim=DIM, inner=INNER, vocab=211,
    )  # fmt: skip
    return read_model(MemoryCheckpoint(config, tensors))


def wrong_heads(run):
    def attention(q, cache, step, **attrs):
        out = run(q, cache, step, **attrs)
        if q.shape[1:] == (HEADS, DIM):
            out[:, 4] = out[:, 3]
        return out

    return attention


def wrong_lanes(run):
    def rope(q, k, cos, sin, **attrs):
        q, k = run(q, k, cos, sin, **attrs)
        if k.shape[1:] == (KV_HEADS, DIM):
            k[:, -1, -1] = 0
        return q, k

    return rope


def wrong_rows(run):
    def linear(x, w):
        y = run(x, w)
        if x.shape[1] == INNER and len(x) > 128:
            y[128:] = 0
        return y

    return linear


def wrong_drafts(run):
    def verify(tokens, step, tables, *, width):
        accepted, tables = run(tokens, step, tables, width=width)
        if width == 5:
            accepted.reshape(-1, width)[:, -1] = -1
        return accepted, tables

    return verify


FAULTS = {
    "attention": wrong_heads,
    "rope": wrong_lanes,
    "linear": wrong_rows,
    "verify": wrong_drafts,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_is_wrong_at_the_sizes_of_a_model_is_named(name, language):
    target = target_of(with_fault(name, FAULTS[name]), model=language)
    results = [perform(check, {}) for check in checks_of(target, ["model"])]
    text = "\n".join(line for each in findings(results) for line in each.lines())
    assert f"{name}/planted on planted:0" in text
    assert "a call of memory" in text


def test_right_kernels_pass_and_every_step_is_there(language):
    results = check_all(target_of(model=language), names=["model"])
    assert [each.name for each in results if each.status != "passed"] == []
    names = {each.name for each in results}
    for step in ("prompt", "decoding", "verifying"):
        assert f"model/attention/{step}/float32" in names or step == "decoding"
        assert f"model/make_step/{step}/float32" in names
    calls = {name.split("/")[1] for name in names}
    assert calls >= {"embedding", "rms_norm", "linear", "rope", "write_kv", "verify"}


def test_only_the_calls_of_an_op_are_checked_if_it_is_named(language):
    target = Target(Device("reference:0"), only=("rope",), model=language)
    names = [each.name for each in checks_of(target, ["model"])]
    assert names
    assert {name.split("/")[1] for name in names} == {"rope"}


def test_a_target_without_a_model_has_no_such_checks():
    assert checks_of(Target(Device("reference:0")), ["model"]) == []


def q8_0_weights(width=64):
    """A model whose matrices are stored in q8_0, of numbers that it has exactly."""
    config, tensors = tiny_llama(
        np.random.default_rng(3), layers=2, hidden=width, heads=4, kv_heads=2,
        head_dim=16, inner=96, vocab=211,
    )  # fmt: skip
    stored = {
        name: q8_0(np.clip(np.rint(400 * array), -127, 127).astype(np.int8))
        if "_proj" in name
        else array
        for name, array in tensors.items()
    }
    return read_model(MemoryCheckpoint(config, stored))


def packing(fault):
    """Return kernels that keep q8_0 blocks; ``fault`` changes the scales."""

    def pack(group, backend, _dtype):
        weight = group["weight"]
        blocks = weight.data.reshape(*weight.shape[:1], -1, 34)
        scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        codes = blocks[..., 2:].copy().view(np.int8).astype(np.float32)
        return Blocks(backend.tensor(wrap(codes)), backend.tensor(wrap(fault(scales))))

    def can_pack(*, weight, bias=None):
        return None if weight.dtype == "q8_0" else f"packs q8_0, not {weight.dtype}"

    def linear(x, w):
        y = x @ (w.codes * w.scales).reshape(w.codes.shape[0], -1).T
        return y.astype(np.float32)

    def kernels():
        for op in catalog().values():
            if not op.composite:
                yield Kernel(op.name, "planted", body_kernel(op, "float32"))
        yield Kernel(
            "linear", "blocks", linear, layout="blocks", pack=pack, can_pack=can_pack,
            preference=1,
        )  # fmt: skip

    return kernels


@in_layout("blocks")
class Blocks(NamedTuple):
    codes: object
    scales: object


def doubled(scales):
    """The last block of each row has twice its scale."""
    scales[:, -1] *= 2
    return scales


def test_weights_in_blocks_are_checked_in_the_layout_of_a_kernel():
    language = q8_0_weights()
    right = target_of(packing(lambda scales: scales), model=language, only=("linear",))
    results = [perform(check, {}) for check in checks_of(right, ["model"])]
    assert [each.message for each in results if each.status != "passed"] == []
    names = {each.name for each in results}
    assert "model/linear/prompt/float32" in names
    (packed,) = [each for each in names if "/blocks/" in each]
    wrong = target_of(packing(doubled), model=language, only=("linear",))
    results = [perform(check, {}) for check in checks_of(wrong, ["model"])]
    (found,) = [each for each in results if each.status != "passed"]
    assert found.name == packed
    assert "linear/blocks on planted:0: error" in found.message
    assert "weights in q8_0" in found.message
