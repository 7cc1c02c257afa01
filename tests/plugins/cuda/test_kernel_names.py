"""A kernel's name says what runs: each launch of a step is of what it names.

The kernels are those of an H100 and of an A100, called on the CPU; launches of Triton
and of CUDA C++ are recorded in place of being run.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from inl.checkpoints.blocks.encode import encode
from inl.executor.model_step import advance
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.spec.limits import Limits
from inl.spec.message import step_frame
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.testing.op_call import OpCall
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from launches import backend_of, launches
from op_cases import Target

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="records launches"
)

SIZES = {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 128, "inner": 512,
         "vocab": 96}  # fmt: skip
NARROW = SIZES | {"inner": 3072}
"""Gate and up are computed by Triton on an A100, and down by the library."""

BUCKETS = {
    "decode 1": Bucket(1, 1), "decode 16": Bucket(16, 16), "decode 64": Bucket(64, 64),
    "decode 512": Bucket(512, 512), "mixed": Bucket(256, 16),
    "mixed, long": Bucket(2048, 16), "prompt": Bucket(2048, 1),
    "drafts": Bucket(16, 4, 4), "few": Bucket(12, 4),
}  # fmt: skip
CHIPS = {"h100": (9, 0), "a100": (8, 0)}
FORMS = ("", "mxfp8", "q4_1", "q4_1, wide", "q8_0")
"""Dtypes of the matrices of layers; bfloat16 if empty."""


@pytest.fixture
def gpu(monkeypatch):
    """Return the backend of a chip, whose tensors are on the CPU."""
    monkeypatch.setenv("INL_CUDA_WEIGHTS", "packed")
    return lambda chip: backend_of(monkeypatch, *CHIPS[chip])


def runner_of(backend, form, sizes):
    config, tensors = tiny_llama(np.random.default_rng(1), **sizes)
    for name, values in tensors.items():
        if form and "proj" in name:
            made = encode(values, form.partition(",")[0])
            if "wide" in form:
                heads = made.data.reshape(len(values), -1, 20)[:, :, :4]
                heads[:] = np.repeat(heads[:, ::4], 4, 1)
            tensors[name] = made
    limits = Limits(
        513, (65,), 16, 160, 96, buckets=tuple(BUCKETS.values()), max_drafts=3
    )
    checkpoint = MemoryCheckpoint(config, tensors)
    return local_runner(backend, MODEL, checkpoint, limits, dtype="bfloat16")


def step(runner, bucket):
    """Compute one step; return what its kernels have used."""
    loaded, executor = runner.loaded, runner.executor
    with launches() as seen:
        frame = torch.from_numpy(
            step_frame(bucket, (), step=0, groups=1, block_size=16, decode_rows=0)
        )
        advance(
            executor.ops(bucket), loaded.model, loaded.config, loaded.weights, frame,
            executor.state,
        )  # fmt: skip
    return seen


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_launch_of_a_step_is_of_what_its_kernel_names(chip, form, gpu):
    for sizes in (SIZES, NARROW):
        runner = runner_of(gpu(chip), form, sizes)
        for name, bucket in BUCKETS.items():
            seen = step(runner, bucket)
            assert not seen.false_names(), name
            assert len(seen.used) >= 8, name


def test_the_kernels_of_an_h100(gpu):
    """Each of the kernels that once were one, in the step that it is for."""
    used = {
        (form, name): set(step(runner, bucket).used)
        for form in ("", "mxfp8", "q4_1, wide")
        for runner in [runner_of(gpu("h100"), form, SIZES)]
        for name, bucket in BUCKETS.items()
    }
    for step_of, label in {
        ("", "decode 1"): "rope_attend/cuda",
        ("", "decode 16"): "rope_attend/triton",
        ("", "few"): "rope_attend/triton_mixed",
        ("", "mixed"): "rope_attend/triton_split",
        ("", "mixed, long"): "rope_attend/triton_gathered",
        ("", "prompt"): "rope_attend/triton+cudnn",
        ("mxfp8", "decode 1"): "norm_mlp/cuda_float8",
        ("mxfp8", "decode 64"): "norm_mlp/triton_float8",
        ("mxfp8", "decode 512"): "norm_mlp/triton+eager_float8",
        ("q4_1, wide", "decode 1"): "linear/cuda+triton_int4",
        ("q4_1, wide", "prompt"): "gated_mlp/triton+eager_int4",
    }.items():
        assert label in used[step_of], (step_of, label, used[step_of])
    for name in ("decode 512", "mixed", "prompt"):
        assert "gated_mlp/triton+eager" in used["", name]
        assert "linear/eager" in used["", name]


@pytest.mark.parametrize("name", sorted(catalog()))
@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_of_an_op(chip, name, gpu):
    backend, spec = gpu(chip), catalog()[name]
    target = Target(backend, backend.kernels())
    for dtype in ("bfloat16", "float32"):
        for case in spec.cases(np.random.default_rng(0)):
            call = OpCall(target, spec, case, dtype)
            with launches() as seen:
                call.result(*call.ready())
            assert not seen.false_names(), case.name


@pytest.mark.parametrize(("bucket", "name", "false"), [
    ("prompt", "triton+cudnn", "triton"), ("decode 1", "cuda", "triton"),
    ("decode 512", "triton+eager", "triton"), ("decode 16", "triton", "triton+eager"),
])  # fmt: skip
def test_a_false_name_is_found(bucket, name, false, gpu):
    runner = runner_of(gpu("h100"), "", SIZES)
    kernels = tuple(
        replace(kernel, name=false)
        if kernel.name == name and not kernel.plan
        else kernel
        for kernel in runner.loaded.selection.kernels
    )
    runner.executor.loaded = replace(runner.loaded, selection=KernelSelection(kernels))
    assert step(runner, BUCKETS[bucket]).false_names()
