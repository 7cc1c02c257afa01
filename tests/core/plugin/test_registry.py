from __future__ import annotations

import sys

import pytest

from inl.device import Device, DeviceInfo
from inl.errors import PluginError
from inl.models import llama

PROBED = """
from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.plugin import hookimpl

calls = []

def probe():
    calls.append(1)
    {body}

@hookimpl
def inl_register_backends(register):
    register("npu", "m:C", probe=probe)
"""


def probed(site, body):
    site.add("npu", PROBED.format(body=body))
    return site.load()


def test_a_probe_gives_the_devices(site, row_of):
    known = probed(site, "return [DeviceInfo(0, 'A', 5), DeviceInfo(2, 'B')]")
    assert known.find("npu").devices == (DeviceInfo(0, "A", 5), DeviceInfo(2, "B"))
    assert known.why_not(Device("npu:2")) is None
    assert known.why_not(Device("npu:1")) == "not among the devices found: npu:0, npu:2"
    assert row_of(known, "npu").detail == "2 devices"
    rows = [(str(row.type), row.info and row.info.index) for row in known.devices()]
    assert rows == [("npu", 0), ("npu", 2), ("reference", 0)]


def test_a_probe_runs_once(site):
    known = probed(site, "return [DeviceInfo(0, 'A')]")
    assert known.plugins
    assert known.devices()
    assert len(sys.modules["npu_entry"].calls) == 1


def test_a_probe_runs_again_after_a_setting_has_changed(site, monkeypatch):
    """The reason of a failed probe names the variable that makes it succeed."""
    body = """
    import os
    if os.environ.get("INL_NPU") != "sim":
        raise BackendUnavailable("no NPU; INL_NPU=sim simulates one")
    return [DeviceInfo(0, 'A')]"""
    known = probed(site, body)
    assert "INL_NPU=sim" in known.why_not(Device("npu"))
    monkeypatch.setenv("INL_NPU", "sim")
    assert known.why_not(Device("npu")) is None
    monkeypatch.delenv("INL_NPU")
    assert "INL_NPU=sim" in known.why_not(Device("npu"))
    assert len(sys.modules["npu_entry"].calls) == 2


def test_a_backend_without_a_probe_is_always_available(site):
    site.add("npu", PROBED.format(body="pass").replace(", probe=probe", ""))
    assert site.load().find("npu").devices == (DeviceInfo(0, "npu"),)


ABSENT = {
    "raise BackendUnavailable('driver not found')": "driver not found",
    "raise BackendUnavailable": "the probe gave no reason",
    "return []": "the probe found no device",
}


@pytest.mark.parametrize("body", ABSENT)
def test_an_absent_device_is_unavailable(site, row_of, body):
    known = probed(site, body)
    row = row_of(known, "npu")
    assert (row.status, row.detail) == ("unavailable", f"npu: {ABSENT[body]}")
    assert known.why_not(Device("npu")) == ABSENT[body]
    (shown,) = [row for row in known.devices() if row.type == "npu"]
    assert (shown.info, shown.reason) == (None, ABSENT[body])


BROKEN = {
    "return None": "TypeError: 'NoneType' object is not iterable",
    "return [0]": (
        "the probe returned 0, accepted: DeviceInfo(index, name, memory_bytes"
    ),
    "return [DeviceInfo(-1, 'A')]": "the probe returned DeviceInfo(index=-1",
    "return [DeviceInfo(0, 'A', 1.5)]": "the probe returned DeviceInfo(index=0",
    "return [DeviceInfo(0, None)]": "the probe returned DeviceInfo(index=0, name=None",
    "return [DeviceInfo(0, 'A'), DeviceInfo(0, 'B')]": (
        "the probe returned an index twice: "
    ),
    "return [DeviceInfo(0, 'A', bytes_per_second=0)]": "the probe returned Device",
    "1 / 0": "ZeroDivisionError: division by zero",
    "exit(1)": "SystemExit: 1",
}


@pytest.mark.parametrize("body", BROKEN)
def test_a_probe_that_fails_makes_its_plugin_broken(site, row_of, body):
    row = row_of(probed(site, body), "npu")
    assert row.status == "broken"
    where = "npu: plugin npu (npu 1.0): the probe failed: "
    assert row.detail.startswith(where + BROKEN[body])


def test_a_probe_that_cannot_be_imported_makes_its_plugin_broken(site, row_of):
    site.add("npu", PROBED.format(body="pass").replace("=probe", "='gone:probe'"))
    row = row_of(site.load(), "npu")
    assert row.status == "broken"
    assert "cannot load probe of npu, gone:probe: ModuleNotFoundError" in row.detail


def test_a_probe_that_raises_keyboard_interrupt_is_broken(site, row_of):
    row = row_of(probed(site, "raise KeyboardInterrupt('x')"), "npu")
    assert row.status == "broken"
    assert row.detail.endswith("the probe failed: KeyboardInterrupt: x")


def test_what_a_probe_prints_goes_to_stderr(site, capsys):
    assert probed(site, "print('probing'); return [DeviceInfo(0, 'A')]").devices()
    assert capsys.readouterr() == ("", "probing\n")


MODELS = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_models(register):
    register("Odd", "{target}")
"""


def test_models_are_imported_by_name(site):
    site.add("odd", MODELS.format(target="inl.models.llama:MODEL"))
    known = site.load()
    assert {"LlamaForCausalLM", "Odd", "llama"} <= set(known.models())
    assert known.models()["Odd"].name == "odd"
    assert known.model("Odd") is llama.MODEL
    assert known.model("llama") is llama.MODEL
    assert known.model("Absent") is None


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("gone:M", "plugin odd (odd 1.0): cannot load model Odd, gone:M: ModuleNotFou"),
        ("json:nothing", "cannot load model Odd, json:nothing: AttributeError"),
        ("json:dumps", "model Odd, json:dumps: found function, accepted: a Model"),
    ],
)
def test_an_invalid_model_names_its_plugin(site, target, sentence):
    site.add("odd", MODELS.format(target=target))
    with pytest.raises(PluginError) as caught:
        site.load().model("Odd")
    assert sentence in str(caught.value)
    assert "plugin odd (odd 1.0)" in str(caught.value)


KERNELS = """
from inl.plugin import hookimpl
from inl.spec.kernel import Kernel

def run(x, w, *, eps): return x

ONE = Kernel("rms_norm", "one", run)
TWO = Kernel("rms_norm", "two", run)
LIST = [ONE, TWO]
def give(): return LIST
def fail(): raise OSError("no compiler")
def number(): return 3
ODD_OP = Kernel("rms_nrom", "one", run)

@hookimpl
def inl_register_kernels(register, device_type):
    if device_type == "reference":
        {body}
"""


def kernels(site, body):
    site.add("extra", KERNELS.format(body=body))
    return site.load()


@pytest.mark.parametrize(
    ("body", "labels"),
    [
        ("register(ONE)", ["one"]),
        ("register(LIST)", ["one", "two"]),
        ("register('extra_entry:ONE')", ["one"]),
        ("register('extra_entry:LIST')", ["one", "two"]),
        ("register('extra_entry:give')", ["one", "two"]),
        ("register(ONE); register('extra_entry:TWO')", ["one", "two"]),
        ("pass", []),
    ],
)
def test_kernels_are_registered_per_device_type(site, row_of, body, labels):
    known = kernels(site, body)
    found = [kernel.label for kernel in known.kernels("reference")]
    assert found == [f"rms_norm/{label}" for label in labels]
    assert known.kernels("cpu") == ()
    expected = "kernels for reference" if labels else "nothing for the devices here"
    row = row_of(known, "extra")
    assert (row.status, row.detail) == ("ready", expected)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("register('gone:K')", "cannot load kernels for reference, gone:K: ModuleNotF"),
        ("register('extra_entry:fail')", "kernels for reference: OSError: no compiler"),
        ("register('extra_entry:number')", "TypeError: 'int' object is not iterable"),
        ("register('extra_entry:run')", "TypeError"),
        ("register('extra_entry:KERNEL')", "AttributeError"),
        ("register('json:__all__')", "found 'dump', accepted: a Kernel"),
        (
            "register(ODD_OP)",
            "kernel rms_nrom/one: there is no op 'rms_nrom'; did you mean 'rms_norm'? ",
        ),
        (
            "register(ONE); register(ONE)",
            "kernel rms_norm/one for reference is already registered by plugin extra",
        ),
    ],
)
def test_invalid_kernels_name_their_plugin(site, body, sentence):
    known = kernels(site, body)
    with pytest.raises(PluginError) as caught:
        known.kernels("reference")
    assert str(caught.value).startswith("plugin extra (extra 1.0): ")
    assert sentence in str(caught.value)
