from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import pytest

from inl.backend.collectives import Rank
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.errors import BackendNotFound, BackendUnavailable, OutOfMemory
from inl.install_command import install_command
from inl.placement.placement import Placement
from inl.plugin import (
    choose_device,
    device_selection,
    make_backend,
    open_host,
    simple_backend,
    speed,
)
from inl.plugin.device_selection import choose_auto
from inl.spec.kernel import Kernel

SERVES = """
from inl.device import Device, DeviceInfo
from inl.errors import BackendUnavailable, OutOfMemory
from inl.plugin import hookimpl

def there():
    return [DeviceInfo(1, "second"), DeviceInfo(0, "first", bytes_per_second=1e11)]

def slow():
    return [DeviceInfo(0, "slow", bytes_per_second=1e10)]

def unmeasured():
    return [DeviceInfo(0, "unmeasured")]

def absent():
    raise BackendUnavailable("driver of {kind} not found")

def fails():
    raise OSError("bus error")

@hookimpl
def inl_register_backends(register):
    register("{kind}", "{backend}", probe={probe})
"""


@pytest.fixture
def serve(site):
    def add(kind, probe="there", backend="inl.backend.reference:ReferenceBackend"):
        source = SERVES.format(kind=kind, probe=probe, backend=backend)
        return site.add(f"inl-{kind}", source, entry=kind)

    return add


def test_make_backend_opens_the_named_device(site, serve):
    serve("npu")
    backend = make_backend("npu:1", site.load())
    assert isinstance(backend, ReferenceBackend)
    assert backend.device == Device("npu", 1)


def test_hosts_are_opened_by_what_the_plugin_registers(site, serve):
    module = serve("npu")
    serve("cuda")
    source = (site.path / f"{module}.py").read_text()
    placement, rank = Placement(tensor=4, hosts=2), Rank(1, 2, "10.0.0.1:7000")
    hosts = f"""
    register("npu", "m:C", there, hosts=hosts)

def hosts(device, placement, rank):
    assert (str(placement), rank.number) == ("{placement}", 1)
    from inl.backend.reference import ReferenceBackend
    return ReferenceBackend(device)
"""
    site.module(module, source.rpartition("    register(")[0] + hosts)
    known = site.load()
    backend = open_host("npu:1", placement, rank, known)
    assert isinstance(backend, ReferenceBackend)
    assert backend.device == Device("npu", 1)
    with pytest.raises(BackendUnavailable, match=r"cuda:1: .* found hosts=2; accepted"):
        open_host("cuda:1", placement, rank, known)


def test_the_reference_is_made_by_name(site):
    backend = make_backend(Device("reference"), site.load())
    assert isinstance(backend, ReferenceBackend)


def refused(kind, device, known):
    with pytest.raises(kind) as caught:
        make_backend(device, known)
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_well_known_type_that_is_not_installed_gets_the_install_line(site, serve):
    serve("cpu")
    assert refused(BackendNotFound, "rocm", site.load()) == (
        f"no backend for rocm; installed: cpu, reference. try: "
        f"{install_command('torch')} --index-url "
        f"https://download.pytorch.org/whl/rocm7.1 && {install_command('inl-rocm')}"
    )
    known = site.load()
    line = install_command("inl-intel")
    assert refused(BackendNotFound, "xpu:1", known).endswith(line)


def test_an_unknown_type_gets_the_list_of_accepted_ones(site):
    assert refused(BackendNotFound, "npu", site.load()) == (
        "no backend for npu; installed: reference. accepted: cpu, cuda, directml, "
        "reference, rocm, tpu, xpu, or a type that an installed plugin serves"
    )


@pytest.mark.parametrize(
    ("dist", "entry"),
    [("inl-cuda", "cuda"), ("Inl_Cuda", "nvidia"), ("acme", "cuda")],
)
def test_a_broken_plugin_is_not_called_missing(site, dist, entry):
    site.add(dist, "raise ImportError('libcuda.so: no such file')", entry=entry)
    assert refused(BackendUnavailable, "cuda", site.load()) == (
        f"cuda: plugin {entry} ({dist} 1.0) is broken: "
        "ImportError: libcuda.so: no such file"
    )


def test_an_unsupported_plugin_is_not_called_missing(site):
    site.add("inl-tpu", "", entry="tpu", group="inl.v3")
    message = refused(BackendUnavailable, "tpu", site.load())
    assert "is unsupported: needs contract 3, this core serves 2.1 and 1.0" in message


def test_a_broken_plugin_of_another_type_changes_nothing(site):
    site.add("inl-cuda", "1 / 0", entry="cuda")
    line = install_command("inl-rocm")
    assert line in refused(BackendNotFound, "rocm", site.load())


def test_an_absent_device_gives_the_reason_of_the_probe(site, serve):
    serve("cuda", "absent")
    message = refused(BackendUnavailable, "cuda:0", site.load())
    assert message == "cuda:0: driver of cuda not found"


def test_a_probe_that_fails_is_named(site, serve):
    serve("cuda", "fails")
    message = refused(BackendUnavailable, "cuda:0", site.load())
    assert message == (
        "cuda:0: plugin cuda (inl-cuda 1.0): the probe failed: OSError: bus error"
    )


def test_an_absent_index_lists_the_available_ones(site, serve):
    serve("npu")
    message = refused(BackendUnavailable, "npu:7", site.load())
    assert message == "npu:7: not among the devices found: npu:1, npu:0"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise OSError('no driver')", "OSError: no driver"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("return 3", "'inl_npu_entry:Backend' returned int, accepted: a Backend"),
    ],
)
def test_a_backend_that_fails_to_open_is_named(site, serve, body, sentence):
    module = serve("npu", backend="inl_npu_entry:Backend")
    source = (site.path / f"{module}.py").read_text()
    site.module(module, f"{source}\ndef Backend(device):\n    {body}\n")
    message = refused(BackendUnavailable, "npu:0", site.load())
    assert message == f"npu:0: plugin npu (inl-npu 1.0): {sentence}"


def test_a_backend_that_cannot_be_imported_is_named(site, serve):
    serve("npu", backend="gone_torch:Backend")
    with pytest.raises(BackendUnavailable) as caught:
        make_backend("npu:0", site.load())
    assert str(caught.value) == (
        "npu:0: plugin npu (inl-npu 1.0): cannot load backend of npu, "
        "gone_torch:Backend: ModuleNotFoundError: No module named 'gone_torch'"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_inl_errors_of_a_backend_propagate(site, serve):
    module = serve("npu", backend="inl_npu_entry:Backend")
    source = (site.path / f"{module}.py").read_text()
    body = "def Backend(device): raise OutOfMemory('asked for 2 bytes')"
    site.module(module, f"{source}\n{body}\n")
    with pytest.raises(OutOfMemory, match="asked for 2 bytes"):
        make_backend("npu:0", site.load())


def test_auto_prefers_accelerators_then_others_then_the_cpu(site, serve):
    order = ["cuda", "rocm", "xpu", "tpu", "directml", "npu", "cpu"]
    for kind in reversed(order):
        serve(kind)
        assert choose_device("auto", site.load()) == Device(kind, 0)


def test_make_backend_resolves_auto(site, serve):
    serve("npu")
    assert make_backend("auto", site.load()).device == Device("npu:0")


def test_an_explicit_name_is_not_changed(site):
    assert choose_device("rocm:3", site.load()) == Device("rocm:3")
    assert choose_device(Device("rocm:3"), site.load()) == Device("rocm:3")


def test_auto_never_takes_the_reference(site, serve):
    serve("cuda", "absent")
    message = refused(BackendNotFound, "auto", site.load())
    assert message == (
        "no device for auto (cuda: driver of cuda not found); installed: cuda, "
        f"reference. try: {install_command('inl-cpu')}, or ask for reference (NumPy, "
        "slow)"
    )


def test_auto_repeats_the_advice_of_an_installed_cpu_backend(site, serve):
    """To install what is installed already would be wrong."""
    serve("cpu", "absent")
    message = refused(BackendNotFound, "auto", site.load())
    assert message == (
        "no device for auto (cpu: driver of cpu not found); installed: cpu, "
        "reference. ask for reference (NumPy, slow)"
    )


def test_auto_logs_skipped_types_once(site, serve, caplog):
    caplog.set_level(logging.DEBUG, "inl")
    serve("tpu", "absent")
    serve("once", "there")
    for _ in range(2):
        choose_device("auto", site.load())
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == (
        "inl",
        "INFO",
        "using once:0 (tpu: driver of tpu not found)",
    )


def test_auto_warns_of_a_broken_plugin(site, serve, caplog):
    site.add("inl-cuda", "1 / 0", entry="cuda")
    serve("warned")
    choose_device("auto", site.load())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "using warned:0 (cuda: ZeroDivisionError: division by zero)"
    )


def test_auto_logs_nothing_if_it_skipped_nothing(site, serve, caplog):
    caplog.set_level(logging.INFO, "inl")
    serve("quiet")
    assert choose_device("auto", site.load()) == Device("quiet:0")
    assert not caplog.records


def test_auto_does_not_select_a_slow_device(site, serve, caplog):
    caplog.set_level(logging.INFO, "inl")
    device_selection._log.cache_clear()
    serve("tpu", "slow")
    serve("cpu")
    choice = choose_auto(site.load())
    assert choice.device == Device("cpu:0")
    assert choice.why() == (
        "auto selects cpu:0: the first in order that is at least half as fast as the "
        "fastest (tpu:0: 5 billion weights/s, declared, cpu:0: 50 billion weights/s, "
        "declared)"
    )
    (record,) = caplog.records
    assert record.getMessage() == (
        "using cpu:0 (slower: tpu:0: 5 billion weights/s, declared)"
    )


def test_one_type_is_selected_without_a_measurement(site, serve, monkeypatch):
    monkeypatch.setattr(speed, "measure", None)
    serve("npu", "unmeasured")
    choice = choose_auto(site.load())
    assert choice.why() == "auto selects npu:0: no other device type is available"


def test_an_undeclared_speed_is_measured_once(site, serve, monkeypatch, tmp_path):
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "SHAPE", (64, 96))
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    measured = []

    def measure(backend):
        measured.append((str(backend.device), speed_measure(backend) > 0))
        return 1e12

    speed_measure = speed.measure
    monkeypatch.setattr(speed, "measure", measure)
    serve("npu", "unmeasured")
    serve("tpu")
    for _ in range(2):
        assert choose_auto(site.load()).device == Device("npu:0")
    assert measured == [("npu:0", True)]


def test_a_device_that_cannot_be_measured_is_not_selected(
    site, serve, tmp_path, monkeypatch
):
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "cache"))
    serve("tpu", "unmeasured", "gone:Backend")
    serve("cpu")
    choice = choose_auto(site.load())
    assert choice.device == Device("cpu:0")
    assert "tpu:0: cannot be measured: BackendUnavailable: tpu:0: " in choice.why()


def test_quantized_weights_are_measured_as_the_backend_packs_them(monkeypatch):
    monkeypatch.setattr(speed, "SHAPE", (64, 96))
    packed = []

    def pack(group, backend, dtype):
        packed.append((group["weight"].dtype, dtype))
        return Packed(backend.tensor(wrap(np.zeros((64, 96), np.float32))))

    kernel = Kernel(
        "linear", "packed", lambda x, w: x @ w.weight.T, layout="packed", pack=pack
    )
    backend = simple_backend(tensor=widen, numpy=wrap, kernels=lambda: [kernel])
    assert speed.measure(backend(Device("npu"))) > 0
    assert packed == [("q4_1", "float32")]


class Packed(NamedTuple):
    weight: Any
    layout = "packed"
