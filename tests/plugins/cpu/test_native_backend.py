"""Backend selection, environment variables, and packing of weights."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest

from inl.checkpoints.files.tensor_file import Entry, TensorFile
from inl.device import Device
from inl.dtypes import HostArray, cast, wrap
from inl.errors import BackendUnavailable, DeviceError
from inl.spec.op import Spec
from inl_cpu import library, selection
from inl_cpu.backend import open_cpu
from inl_cpu.kernels.dense import can_pack
from inl_cpu.library import open_library
from inl_cpu.matrix import pack_pairs, pack_rows


def test_native_is_the_default(backend):
    assert selection.select_backend().name == "native"
    assert "native kernels" in selection.select_backend().note
    assert type(open_cpu(Device("cpu"))) is type(backend)


def test_torch_can_be_requested(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("INL_CPU", "torch")
    assert selection.select_backend() == ("torch", "torch; INL_CPU=torch was requested")
    assert type(open_cpu(Device("cpu"))).__name__ == "TorchCpuBackend"


def test_without_the_library_torch_is_selected(monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "find_spec", lambda name: name)
    monkeypatch.setattr(selection, "require_framework", lambda *_: None)
    monkeypatch.setattr(selection, "open_library", lambda: missing(tmp_path))
    assert selection.select_backend().name == "torch"
    assert "was not built" in selection.select_backend().note


def test_a_requested_backend_does_not_fall_back(monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "open_library", lambda: missing(tmp_path))
    monkeypatch.setenv("INL_CPU", "native")
    with pytest.raises(BackendUnavailable, match=r"INL_CPU=native .* was not built"):
        selection.select_backend()


def test_without_any_backend_the_error_suggests_an_install(monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "open_library", lambda: missing(tmp_path))
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    with pytest.raises(
        BackendUnavailable, match=r"inl-cpu\[torch\].* try: inl build-kernels"
    ):
        selection.select_backend()


def missing(folder):
    return open_library(folder / "libinl.so")


def test_an_invalid_library_file(tmp_path):
    place = tmp_path / "libinl.so"
    place.write_bytes(b"\x7fELF, but not really")
    found = open_library(place)
    assert found.library is None
    assert "cannot be loaded" in found.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("INL_CPU", "gpu"),
        ("INL_CPU_ISA", "sse9"),
        ("INL_CPU_ISA", "neon" if sys.platform == "linux" else "none"),
        ("INL_THREADS", "many"),
    ],
)
def test_invalid_variables_are_refused_by_name(backend, name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=f"variable {name}: found '{value}'"):
        open_cpu(Device("cpu"))


def test_the_scalar_kernels_can_be_forced(backend, monkeypatch):
    monkeypatch.setenv("INL_CPU_ISA", "scalar")
    assert library.open_machine().isa == "scalar"


def test_pools_are_shared_by_backends(backend):
    assert library.open_machine() is backend.emitter.machine


def test_tensors_of_packed_dtypes_are_refused(backend):
    packed = HostArray(np.zeros((2, 20), np.uint8), "q4_1", (2, 32))
    with pytest.raises(DeviceError, match=r"dtype: found 'q4_1', a tensor takes"):
        backend.tensor(packed)


def test_an_invalid_input_precision_is_refused(backend, monkeypatch):
    monkeypatch.setenv("INL_CPU_INPUTS", "int3")
    weights = quantized(np.ones((16, 32), np.float32), "q8_0", "Q8_0")
    with pytest.raises(DeviceError, match="INL_CPU_INPUTS: found 'int3', accepted"):
        pack_rows([weights], "bfloat16", backend.emitter)


def quantized(values, name, kind):
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return HostArray(packed, name, values.shape)


def rows_of(backend, matrix):
    """Every row, read by the embedding kernel."""
    kernel = next(k for k in backend.kernels() if k.label == "embedding/native")
    from inl_cpu.kernels.dense import TiledLinear

    ids = np.arange(matrix.rows, dtype=np.int32)
    return kernel.run(ids, TiledLinear(matrix))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_blocks_are_lossless(backend, rng, kind, dtype):
    source = quantized(rng.standard_normal((37, 96), np.float32), kind.lower(), kind)
    (matrix,) = pack_rows([source], dtype, backend.emitter)
    assert matrix.shape[0] < 48 * 96 * 1.6
    want = gguf.quants.dequantize(source.data, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(rows_of(backend, matrix), want, rtol=1e-6, atol=1e-7)


def test_an_unsupported_kind_is_decoded(backend, rng):
    source = quantized(rng.standard_normal((20, 256), np.float32), "tq2_0", "TQ2_0")
    (matrix,) = pack_rows([source], "float32", backend.emitter)
    want = gguf.quants.dequantize(source.data, gguf.GGMLQuantizationType.TQ2_0)
    np.testing.assert_array_equal(rows_of(backend, matrix), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_takes_half_the_bytes(backend, rng, dtype):
    source = cast(rng.standard_normal((32, 64)), "bfloat16")
    (matrix,) = pack_rows([source], dtype, backend.emitter)
    assert matrix.shape == (32 * 64 * 2,)
    want = (source.data.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(rows_of(backend, matrix), want)


def test_different_packings_are_not_stacked(backend, rng):
    values = rng.standard_normal((16, 64), np.float32)
    mixed = [quantized(values, "q4_1", "Q4_1"), quantized(values, "q8_0", "Q8_0")]
    assert len(pack_rows(mixed, "float32", backend.emitter)) == 2
    assert len(pack_rows(mixed[:1] * 2, "float32", backend.emitter)) == 1
    assert len(pack_pairs(*mixed, "float32", backend.emitter)) == 2


def test_tied_weights_of_a_file_are_packed_once(backend, rng, tmp_path):
    values = rng.standard_normal((64, 32), np.float32)
    path = tmp_path / "weights"
    path.write_bytes(values.tobytes() * 2)
    file = TensorFile(path)
    first = Entry("float32", (64, 32), 0, values.nbytes)
    second = Entry("float32", (64, 32), values.nbytes, 2 * values.nbytes)

    def packed(entry, dtype="float32"):
        return pack_rows([file.array(entry)], dtype, backend.emitter)[0]

    one = packed(first)
    assert packed(first) is one
    assert packed(second) is not one
    assert packed(first, "bfloat16") is not one
    np.testing.assert_array_equal(rows_of(backend, one), values)


def test_equal_arrays_in_memory_are_packed_separately(backend, rng):
    values = rng.standard_normal((16, 32), np.float32)
    (one,) = pack_rows([wrap(values)], "float32", backend.emitter)
    values[:] = 7
    (two,) = pack_rows([wrap(values)], "float32", backend.emitter)
    assert one is not two
    assert (rows_of(backend, two) == 7).all()


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ({"weight": Spec((4, 5, 6), "float32")}, "weight of shape [4, 5, 6] is not"),
        ({"weight": Spec((0, 6), "float32")}, "weight of shape [0, 6] is not a matrix"),
        ({"weight": Spec((4, 6), "q9_9")}, "weight has an unknown dtype, q9_9"),
        ({"weight": Spec((4, 6), "float32"), "bias": Spec((4,), "float32")}, None),
    ],
)
def test_unsupported_weights_are_refused(specs, reason):
    found = can_pack(**specs)
    assert found is None if reason is None else found.startswith(reason)
