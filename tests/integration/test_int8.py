"""Int8 networks in LiteRT, against the same networks in float64."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from inl import nn
from inl.errors import BackendUnavailable, MissingPackage, RequestError
from inl.hardware.edge_tpu import EdgeTPUBackend, is_edge_tpu_available

DIGITS = Path(__file__).parents[1] / "data" / "digits" / "digits.csv.gz"
needs_litert = pytest.mark.skipif(
    find_spec("ai_edge_litert") is None,
    reason="LiteRT is not installed: pip install 'inl-toolkit[edge]'",
)


def linear(rng, inputs, outputs, **options):
    return nn.Linear(inputs, outputs, rng=rng, device="reference", **options)


def network(rng, *widths, bias=True, last_relu=False):
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [linear(rng, inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def exact(model, x):
    """The outputs of every Linear in float64, before and after its ReLU."""
    layers, found = model.layers, []
    for at, layer in enumerate(layers):
        if isinstance(layer, nn.ReLU):
            continue
        weight = layer.weight.numpy().astype(np.float64)
        bias = 0.0 if layer.bias is None else layer.bias.numpy().astype(np.float64)
        y = x @ weight.T + bias
        x = np.maximum(y, 0) if layers[at + 1 : at + 2] else y
        found.append((weight, x))
    return found


def bound(model, exported, x):
    """Largest error of rounding inputs, weights, biases and outputs to their grids."""
    error = np.full(x.shape, exported.source.scale / 2)
    for (weight, y), layer in zip(exact(model, x), exported.layers, strict=True):
        half = layer.weight_scale / 2
        error = error @ np.abs(weight).T + (
            half * (np.abs(x) + error).sum(1, keepdims=True)
        )
        # Half a step of the output, half of the bias, and one of the multiplier.
        error = error + 1.5 * layer.output.scale
        x = y
    return error


@needs_litert
@pytest.mark.parametrize(
    ("widths", "options"),
    [
        ((8, 3), {}), ((5, 1), {"bias": False}), ((64, 48, 10), {}),
        ((16, 32, 32, 4), {"last_relu": True}), ((3, 200, 2), {"bias": False}),
    ],
)  # fmt: skip
def test_outputs_are_within_the_error_of_quantization(widths, options):
    rng = np.random.default_rng(len(widths))
    model = network(rng, *widths, **options)
    x = rng.standard_normal((60, widths[0])) + 0.5
    exported = nn.export_int8(model, x, batch=60)
    want = exact(model, x)[-1][1]
    off = np.abs(exported(x) - want)
    assert (off <= bound(model, exported, x)).all()
    assert 0 < off.max() < 0.06 * np.abs(want).max(), "too coarse"
    if len(exported.layers) < 3:  # the bound of deep networks is wide
        assert (np.abs(want - want.mean(0)) > bound(model, exported, x)).any()


@needs_litert
def test_the_file_has_fixed_shapes_and_int8_ops_only(tmp_path):
    rng = np.random.default_rng(0)
    exported = nn.export_int8(network(rng, 6, 5, 4), np.ones((2, 6)), batch=3)
    exported.save(tmp_path / "net.tflite")
    assert (tmp_path / "net.tflite").read_bytes()[4:8] == b"TFL3"
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(tmp_path / "net.tflite"))
    details = interpreter.get_tensor_details()
    kinds = {each["name"]: np.dtype(each["dtype"]).name for each in details}
    assert {kinds.pop(f"layer{n}/bias") for n in (0, 1)} == {"int32"}
    assert set(kinds.values()) == {"int8"}
    shapes = {each["name"]: each["shape_signature"].tolist() for each in details}
    assert shapes["input"] == [3, 6]
    assert shapes["layer1"] == [3, 4]
    assert all(size > 0 for shape in shapes.values() for size in shape)
    ops = {each["op_name"] for each in interpreter._get_ops_details()}
    assert ops - {"DELEGATE"} == {"FULLY_CONNECTED"}
    assert sum(each["quantization"][0] > 0 for each in details) == len(details)


@needs_litert
def test_digits_keep_their_accuracy():
    data = np.loadtxt(DIGITS, delimiter=",", dtype=np.int32)
    pixels, classes = (data[:, :-1] / 16).astype(np.float32), data[:, -1]
    model = network(np.random.default_rng(0), 64, 32, 10)
    optimizer = nn.Adam(model.parameters(), lr=1e-2)
    order = np.random.default_rng(1).permutation(len(data))
    train, held = order[:1300], order[1300:]
    for _ in range(6):
        for rows in np.split(train, 13):
            optimizer.zero_grad()
            x = nn.Tensor(pixels[rows], "reference")
            nn.cross_entropy(model(x), classes[rows]).backward()
            optimizer.step()
    exported = nn.export_int8(model, pixels[train], batch=len(held))
    found = exported(pixels[held]).argmax(1)
    plain = exact(model, pixels[held])[-1][1].argmax(1)
    accuracy = (plain == classes[held]).mean()
    assert accuracy > 0.93
    assert abs((found == classes[held]).mean() - accuracy) <= 0.01


def test_what_cannot_be_exported_is_refused():
    rng = np.random.default_rng(0)
    good = network(rng, 4, 3)
    norm = nn.LayerNorm(4, device="reference")
    x = np.ones((2, 4))
    for call, message in (
        (lambda: nn.export_int8(norm, x), "found LayerNorm, accepted: Sequential"),
        (lambda: nn.export_int8(nn.ReLU(), x), "found ReLU, accepted"),
        (lambda: nn.export_int8(nn.Sequential(), x), "at least one Linear"),
        (lambda: nn.export_int8(good, x[0]), r"samples \[4\]"),
        (lambda: nn.export_int8(good, x * np.nan), "finite samples"),
        (lambda: nn.export_int8(good, x[:, :3]), "found 3 inputs of a Linear of 4"),
        (lambda: nn.export_int8(good, x, batch=0), "batch: found 0"),
    ):
        with pytest.raises(RequestError, match=message):
            call()


@needs_litert
def test_another_shape_is_refused():
    exported = nn.export_int8(network(np.random.default_rng(0), 4, 3), np.ones((2, 4)))
    with pytest.raises(RequestError, match=r"found \[2, 4\], accepted: \[1, 4\]"):
        exported(np.ones((2, 4)))


def test_without_litert_the_package_is_named(monkeypatch):
    for name in ("schema_py_generated", "interpreter"):
        monkeypatch.setitem(sys.modules, f"ai_edge_litert.{name}", None)
    with pytest.raises(MissingPackage, match=r"inl-toolkit\[edge\]"):
        nn.export_int8(network(np.random.default_rng(0), 4, 3), np.ones((2, 4)))


def test_an_absent_edge_tpu_says_what_is_missing(tmp_path, monkeypatch):
    if is_edge_tpu_available():
        pytest.skip("an Edge TPU is here")
    backend = EdgeTPUBackend()
    assert backend.initialize() is False
    assert "install" in backend.why_not()
    plain, compiled = tmp_path / "plain.tflite", tmp_path / "plain_edgetpu.tflite"
    plain.write_bytes(b"TFL3")
    compiled.write_bytes(b"TFL3 edgetpu-custom-op")
    with pytest.raises(BackendUnavailable, match=r"run edgetpu_compiler .*plain"):
        backend.load(plain)
    with pytest.raises(BackendUnavailable, match=r"is not open: .*install"):
        backend.load(compiled)
    monkeypatch.setattr("inl_toolkit.hardware.edge_tpu.find_spec", lambda _: object())
    assert "libedgetpu" in backend.why_not()
    monkeypatch.setattr("inl_toolkit.hardware.edge_tpu.find_spec", lambda _: None)
    assert "LiteRT is not installed" in backend.why_not()
