from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inl import Device, DeviceType
from inl.device import MAX_INDEX
from inl.errors import DeviceError

WELL_KNOWN = ["cpu", "cuda", "rocm", "xpu", "directml", "tpu", "reference"]


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_well_known_types_are_constants(name):
    assert getattr(DeviceType, name.upper()) == DeviceType(name) == name


def test_a_device_type_is_a_string():
    npu = DeviceType("npu")
    assert isinstance(npu, str)
    assert f"{npu}|{npu!r}|{npu:>5}" == "npu|DeviceType('npu')|  npu"
    assert {npu: 1}["npu"] == 1


@pytest.mark.parametrize(
    "device",
    [
        Device("cuda:1"),
        Device("cuda", 1),
        Device(DeviceType.CUDA, 1),
        Device(DeviceType("cuda"), index=1),
    ],
)
def test_spellings_of_one_device(device):
    assert device == Device("cuda:1")
    assert hash(device) == hash(Device("cuda:1"))
    assert (device.type, device.index, str(device)) == (DeviceType.CUDA, 1, "cuda:1")
    assert isinstance(device.type, DeviceType)


def test_the_index_is_zero_if_none_is_given():
    assert Device("cpu") == Device("cpu:0") == Device(DeviceType.CPU, 0)


def test_a_device_is_frozen_and_can_be_pickled():
    device = Device("npu:3")
    with pytest.raises(FrozenInstanceError):
        device.index = 4
    assert pickle.loads(pickle.dumps(device)) == device
    assert copy.deepcopy(device) == device


BAD_DEVICES = [
    "",
    ":",
    ":0",
    "cuda:",
    "cuda:x",
    "cuda:-1",
    "cuda:+1",
    "cuda:01",
    "cuda:1:2",
    "cuda: 1",
    "cuda:1\n",
    "cuda:\u0661",
    "CUDA:-1",
    "Cuda",
    "\u0441uda",
    "cu da",
    "1gpu",
    "_gpu",
    f"cuda:{MAX_INDEX + 1}",
    "cuda:99999999999999999999",
    "a" * 33,
    None,
    7,
    b"cpu",
]


@pytest.mark.parametrize("name", BAD_DEVICES)
def test_a_bad_name_says_what_is_accepted(name):
    with pytest.raises(DeviceError) as caught:
        Device(name)
    assert f"found {name!r:.80}, accepted: a lower-case type" in str(caught.value)
    assert "cuda:1" in str(caught.value)


@pytest.mark.parametrize("index", [-1, MAX_INDEX + 1, True, 1.0, "1"])
def test_a_bad_index_says_what_is_accepted(index):
    with pytest.raises(DeviceError, match=f"with index {index!r}, accepted"):
        Device("cuda", index)


def test_an_index_may_be_given_once():
    with pytest.raises(DeviceError, match="'cuda:1' with index 1, accepted"):
        Device("cuda:1", 1)


def test_auto_is_not_a_device():
    with pytest.raises(DeviceError, match="found 'auto', which is not a device"):
        Device("auto")


@pytest.mark.parametrize("name", ["", "CPU", "a-b", "a" * 33, None, 3])
def test_a_bad_type_says_what_is_accepted(name):
    with pytest.raises(DeviceError, match="accepted: lower-case letters"):
        DeviceType(name)


@given(st.text(max_size=12))
def test_any_text_is_a_device_or_a_device_error(text):
    try:
        device = Device(text)
    except DeviceError:
        return
    assert Device(str(device)) == device
    assert text in (str(device), device.type)


def test_the_reference_is_always_available():
    assert Device("reference").is_available()
    assert Device("reference").why_not() is None


def test_an_unavailable_device_has_a_reason():
    absent = Device("no_such_thing")
    assert not absent.is_available()
    assert "no backend for no_such_thing is installed" in absent.why_not()
    assert "not among the devices found" in Device("reference:9").why_not()
