"""The report of bench/cuda_names.py on the profile of a step, without a GPU."""

from __future__ import annotations

import json
import os
from argparse import Namespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")
cuda_names = pytest.importorskip("cuda_names")

CALLS = {
    "norm_mlp/triton": ["_norm", "rows_product"],
    "rope_attend/cuda": ["attend_one"],
    "rope_attend/triton+cudnn": [
        "_rope", "cudnn_generated_fort_native_sdpa_sm90_knob_7_128x128", "gather_keys",
    ],
    "linear/eager": [
        "nvjet_tst_128x64_64x5_1x2_h_bz_TNT",
        "void cublasLt::splitKreduce_kernel<float>",
    ],
    "linear/triton+eager_int4": ["unpack_int4", "sm90_xmma_gemm_bf16bf16_bf16f32"],
    "rope_attend/triton_mixed": [
        "_rope_write", "attend_tiles",
        "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<long>>",
        "void at::native::direct_copy_kernel<float>",
    ],
}  # fmt: skip
"""Label -> device kernels of a call."""


def write(path, calls, *, correlated=True):
    """Write a profile in which the device is late by a call."""
    events, late = [{"name": "process_name", "ph": "M"}], 1000.0 if correlated else 0
    for number, (label, kernels) in enumerate(calls.items()):
        start = 1000.0 * number
        name = f"kernel {label}"
        events.append(
            {"cat": "user_annotation", "name": name, "ts": start, "dur": 900.0}
        )
        for index, kernel in enumerate(kernels):
            at, link = start + 10 + 20 * index, {"correlation": 10 * number + index}
            device = {"cat": "kernel", "name": kernel, "ts": at + late, "dur": 5.0}
            events.append(device | ({"args": link} if correlated else {}))
            if correlated:
                launch = {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": at}
                events.append(launch | {"dur": 2.0, "args": link})
    path.write_text(json.dumps({"traceEvents": events}))
    return ["--trace", str(path)]


@pytest.mark.parametrize("correlated", [True, False])
def test_true_names(tmp_path, capsys, correlated):
    arguments = write(tmp_path / "trace.json", CALLS, correlated=correlated)
    assert cuda_names.main(arguments) == 0
    said = capsys.readouterr().out
    assert "false names: none" in said
    for label, kernels in CALLS.items():
        assert f"  {label}\n" in said
        assert all(kernel in said for kernel in kernels)


@pytest.mark.parametrize(("label", "kernel"), [
    ("norm_mlp/triton", "nvjet_tst_128x64"),
    ("rope_attend/triton_gathered", "cudnn_generated_fort_native_sdpa_sm90"),
    ("rope_attend/triton", "attend_one"), ("linear/triton_int4", "one_row"),
    ("linear/eager", "rows_product"), ("linear/cuda_float8", "streamed_float8"),
    ("gated_mlp/triton",
     "void at::native::vectorized_elementwise_kernel<4, silu<c10::BFloat16>>"),
])  # fmt: skip
def test_a_false_name_fails(tmp_path, capsys, label, kernel):
    calls = CALLS | {label: [kernel]}
    assert cuda_names.main(write(tmp_path / "trace.json", calls)) == 1
    said = capsys.readouterr().out
    assert f"{label}  FALSE NAME" in said
    assert f"false names: {label}\n" in said


def test_a_profile_without_device_kernels_fails(tmp_path, capsys):
    calls = {label: [] for label in CALLS}
    assert cuda_names.main(write(tmp_path / "trace.json", calls)) == 2
    assert "no device kernels" in capsys.readouterr().err


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="records launches"
)
def test_each_step_of_a_model_is_profiled(monkeypatch):
    """On the CPU, where launches are recorded in place of being run."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import inl_cuda.backend
    from inl.spec import dispatch
    from launches import backend_of, launches

    backend = backend_of(monkeypatch, 9, 0)
    for owner, name, value in (
        (inl_cuda.backend, "CudaBackend", backend), (torch.cuda, "synchronize", None),
        (torch.cuda, "get_device_name", "a GPU"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(dispatch, "noting", dispatch.noting)
    kinds = {"activities": [ProfilerActivity.CPU]}
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: profile(**kinds))
    given = Namespace(model="tiny", layers=2, quantize="", wide=False)
    with launches():
        seen = {
            name: {each.label for each in cuda_names.ranges(events)}
            for name, events in cuda_names.profiled(given)
        }
    assert set(seen) == set(cuda_names.BUCKETS)
    assert "rope_attend/triton" in seen["64 rows"]
    assert "rope_attend/triton_split" in seen["a prompt"]
