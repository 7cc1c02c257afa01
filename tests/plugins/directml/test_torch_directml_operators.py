"""The torch route: no operator of a forward pass that torch-directml lacks.

The table says for each operator of torch 2.4.1 whether the wheel of torch-directml
0.2.5 computes it on the device. ``reviewed_composites.json`` lists the composites that
were reviewed, each with the operators that it consists of on a device.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch.nn import functional

from inl.backend.base import Traits
from inl.backend.host import host_memory
from inl.device import Device
from inl.errors import KernelFailed
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.spec.step import SAMPLERS
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.testing.traffic import Traffic, play
from inl_directml.legacy import operators
from inl_directml.legacy.detours import REPLACED, Detours
from inl_torch.backend import TorchBackend
from inl_torch.eager import attention, sample
from recorded_operators import Recorder

DATA = Path(__file__).parents[2] / "data" / "torch_directml_effective.json"
TABLE = json.loads(DATA.read_text("utf-8"))
REVIEWED = json.loads(
    Path(__file__).with_name("reviewed_composites.json").read_text("utf-8")
)
NATIVE = ("native", "native_via_out")
LIMITS = Limits(
    slots=5,
    blocks=(61,),
    block_size=4,
    max_blocks_per_seq=12,
    vocab=96,
)


class OnHost(TorchBackend):
    """torch's CPU in place of DirectML."""

    traits = Traits(dtypes=("float32",))

    def __init__(self):
        self.device, self.place = Device("directml:0"), torch.device("cpu")

    def memory(self):
        return host_memory()


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Take the branches of the kernels that devices other than the CPU take."""
    monkeypatch.setattr(attention, "exact_plan", attention.static_plan)
    monkeypatch.setattr(sample, "_may_filter", lambda _: True)
    # torch 2.4 cannot record views of another dtype in inference mode.
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)


def texts():
    """Prompts and decoding with every sampler; returns the tokens."""
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(1), layers=2))
    found = []
    for sampler in SAMPLERS:
        limits = replace(LIMITS, sampler=sampler)
        runner = local_runner(OnHost(), MODEL, files, limits)
        traffic = Traffic(np.random.default_rng(2), runner.limits, sampler=sampler)
        found.append(play(runner, traffic.frames(10)))
    return found


def missing(names):
    """Return the operators that are neither native nor reviewed."""
    native = {name for name in names if TABLE.get(name) in NATIVE}
    return set(names) - native - set(REVIEWED)


def test_every_operator_of_a_forward_pass_is_native(as_on_a_device):
    recorder = Recorder()
    with recorder, Detours():
        found = texts()
    assert missing(recorder.seen) == set()
    assert {"mm", "bmm", "_softmax", "_index_put_impl_"} & recorder.seen
    # Nothing waits for the device in the middle of a step.
    assert "_local_scalar_dense" not in recorder.seen
    assert found == texts()
    assert sum(len(text) for each in found for text in each.values()) > 50


def test_without_the_detours_operators_are_missing(as_on_a_device):
    recorder = Recorder()
    with recorder:
        texts()
    assert missing(recorder.seen) >= {
        "__lshift__.Scalar",
        "__rshift__.Scalar",
        "index_copy_",
        "index_fill_.int_Scalar",
        "roll",
    }


def test_a_planted_operator_is_found():
    with Recorder() as recorder:
        torch.zeros(4).index_copy_(0, torch.tensor([1]), torch.ones(1))
    assert missing(recorder.seen) == {"index_copy_"}
    assert missing({"mm", "not_an_operator"}) == {"not_an_operator"}


def test_the_backend_accepts_exactly_these_operators():
    assert operators.native() == {name for name in TABLE if not missing({name})}
    with pytest.raises(KernelFailed, match="kernel for index_copy_ "):  # noqa: SIM117
        with operators.NativeOnly():
            torch.zeros(4).index_copy_(0, torch.tensor([1]), torch.ones(1))


def test_reviewed_composites_consist_of_native_operators():
    assert {TABLE[name] for name in REVIEWED} == {"composite_explicit"}
    parts = {part for parts in REVIEWED.values() for part in parts}
    assert {TABLE[part] for part in parts} <= set(NATIVE)


X = torch.arange(-6, 6, dtype=torch.int32).reshape(3, 4)
Q = torch.linspace(-1, 1, 24).reshape(1, 3, 8)
CALLS = [
    (torch.Tensor.index_copy_, (X, 1, torch.tensor([2, 0]), X[:, :2] * 9), {}),
    (torch.Tensor.index_fill_, (X, 0, torch.tensor([2, 1]), 5), {}),
    (torch.Tensor.roll, (X, 1, -1), {}),
    (torch.roll, (X, 3, 0), {}),
    (torch.Tensor.__lshift__, (X, 3), {}),
    (torch.Tensor.__rshift__, (X, 1), {}),
    (
        functional.scaled_dot_product_attention,
        (Q, Q * 2, Q + 1),
        {"scale": 0.3, "is_causal": True},
    ),
    (
        functional.scaled_dot_product_attention,
        (Q, Q * 2, Q + 1),
        {"scale": 0.3, "attn_mask": torch.eye(3)},
    ),
]


@pytest.mark.parametrize(("function", "args", "options"), CALLS)
def test_a_detour_equals_what_it_replaces(function, args, options):
    want = function(args[0].clone(), *args[1:], **options)
    with Detours():
        found = function(args[0].clone(), *args[1:], **options)
    assert found.dtype == want.dtype
    torch.testing.assert_close(found, want)


def test_every_detour_is_compared():
    assert {function for function, *_ in CALLS} == set(REPLACED)
