"""Files of ``torch.save``, written byte by byte: read, mapped, never executed."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile

import numpy as np
import pytest

from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.files.pickle_reader import read_pickle
from inl.dtypes import widen
from inl.errors import CheckpointError
from outcomes import Outcomes
from torch_pickles import (
    ORDERED,
    call,
    mapping,
    name,
    number,
    program,
    storage,
    tensor,
    text,
)

DATA = np.arange(12, dtype=np.float32)
PLAIN = {"w": tensor((3, 4), (4, 1), size=12)}


@pytest.fixture
def folder(tmp_path):
    """Writes a model folder with one archive and opens it."""

    def write(code, members=None, *, order=b"little", compress=0, file="model.pt"):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3}))
        members = {"0": DATA.tobytes()} if members is None else members
        with zipfile.ZipFile(tmp_path / file, "w", compress) as archive:
            archive.writestr("model/data.pkl", code)
            if order is not None:
                archive.writestr("model/byteorder", order)
            for key, data in members.items():
                archive.writestr(f"model/data/{key}", data)
        return open_checkpoint(tmp_path)

    return write


def test_shards_with_an_index(folder, tmp_path):
    files = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    placed = dict(zip("vw", files, strict=True))
    saved = tmp_path / "pytorch_model.bin.index.json"
    saved.write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*one of 1 of 2 files"):
        folder(program({"v": PLAIN["w"]}), file=files[0])
    found = folder(program(PLAIN), file=files[1])
    assert found.names() == ["v", "w"]
    assert np.array_equal(widen(found.tensor("w")), DATA.reshape(3, 4))
    saved.unlink()
    with pytest.raises(
        CheckpointError, match=r"found .*pytorch_model\.bin\.index\.json"
    ):
        folder(program(PLAIN), file=files[1])


def test_a_tensor(folder):
    found = folder(program(PLAIN))
    assert found.names() == ["w"]
    assert found.spec("w") == ("float32", (3, 4))
    assert np.array_equal(widen(found.tensor("w")), DATA.reshape(3, 4))


@pytest.mark.parametrize("wrapper", ["model_state_dict", "state_dict", "model"])
def test_a_wrapped_dict_of_parameters(folder, wrapper):
    parameter = call(
        "torch._utils", "_rebuild_parameter", PLAIN["w"] + b"\x88" + ORDERED
    )
    inner = mapping({"a.b": parameter}, ORDERED)
    attributes = b"}" + text("_metadata") + b"}s" + b"b"
    code = program({"epoch": number(3), wrapper: inner + attributes, "lr": b"N"})
    found = folder(code, file="weights.pth")
    assert np.array_equal(widen(found.tensor("a.b")), DATA.reshape(3, 4))


def test_several_tensors_of_one_storage(folder):
    items = {
        "all": tensor((12,), (1,)),
        "tail": tensor((2, 2), (2, 1), size=12, offset=8),
        "one": tensor((), (), size=12, offset=5),
        "none": tensor((0, 7), (7, 1), size=12),
        "odd strides of one": tensor((1, 3), (99, 1), size=12),
        "ids": tensor((2,), (1,), key="7", kind="LongStorage"),
        "half": tensor((2,), (1,), key="b", kind="BFloat16Storage"),
    }
    members = {
        "0": DATA.tobytes(),
        "7": np.array([5, -1]).tobytes(),
        "b": np.array([0x3F80, 0xC000], np.uint16).tobytes(),
    }
    found = folder(program(items), members, file="pytorch_model.bin")
    got = {key: widen(found.tensor(key)) for key in found.names()}
    assert got["tail"].tolist() == [[8, 9], [10, 11]]
    assert got["one"] == 5
    assert got["none"].shape == (0, 7)
    assert got["odd strides of one"].tolist() == [[0, 1, 2]]
    assert got["ids"].tolist() == [5, -1]
    assert got["half"].tolist() == [1, -2]


def test_safetensors_are_preferred(folder, tmp_path):
    folder(program(PLAIN))
    header = json.dumps({}).encode()
    data = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(data)
    assert open_checkpoint(tmp_path).names() == []


def test_two_weight_files_are_refused(folder, tmp_path):
    folder(program(PLAIN))
    with pytest.raises(CheckpointError, match=r"found model\.pt, other\.pt; accepted"):
        folder(program(PLAIN), file="other.pt")
    with pytest.raises(CheckpointError, match="a pt file alone has no config"):
        open_checkpoint(tmp_path / "model.pt")


class Bomb:
    """An object whose pickle calls a function on loading."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", ["beside", "inside", "key"])
def test_a_call_is_refused_by_name(folder, tmp_path, protocol, place):
    canary = tmp_path / "executed"
    bomb = Bomb(canary)
    held = {
        "beside": {"state_dict": {}, "optimizer": bomb},
        "inside": {"w": [bomb]},
        "key": {("w", bomb): 1},
    }[place]
    code = pickle.dumps(held, protocol)
    with pytest.raises(CheckpointError) as caught:
        folder(code)
    assert not canary.exists()
    told = str(caught.value)
    # Protocols 0 and 1 fail at instructions that torch never writes.
    assert re.search(r"mkdir', which would be executed|the instruction ", told)
    if protocol >= 2:
        assert "mkdir" in told
    pickle.loads(code)
    assert canary.exists(), "the bomb is a real one"


HOSTILE = {
    "a builtin": name("builtins", "eval"),
    "by the stack": text("os") + text("system") + b"\x93",
    "an attribute's attribute": name("torch", "FloatStorage.__init__"),
    "another of torch": name("torch", "load"),
    "another rebuild": name("torch._utils", "_rebuild_device_tensor_from_numpy"),
    "a class by its module": name("collections", "defaultdict"),
    "a dotted way out": name("torch._utils", "_rebuild_tensor_v2.__globals__"),
    "an instance": b"(ios\nsystem\n",
    "an object": b"(" + name("collections", "OrderedDict") + b"o",
    "a new object": name("collections", "OrderedDict") + b")\x81",
    "an extension": b"\x82\x01",
    "a persistent id in text": b"Pstorage\n",
    "a name that is no text": b"]]\x93",
    "a storage of nobody": storage("0", 12, "QStorage"),
    "a storage of another": storage("0", 12, module="os"),
    "no storage at all": b"(" + text("module") + b"tQ",
    "a storage called": name("torch", "FloatStorage") + b")R",
    "a call of a value": text("os.system") + b")R",
    "attributes of a list": b"]}b",
    "an ordered dict of pairs": call("collections", "OrderedDict", b"]" + b"Na"),
    "a tensor of nothing": call("torch._utils", "_rebuild_tensor_v2", b"NNNN"),
    "a parameter of nothing": call("torch._utils", "_rebuild_parameter", b"N\x88N"),
    "sizes below 0": tensor((-1,), (1,), size=12),
    "a huge offset": tensor((1,), (1,), size=12, offset=-1),
    "a note of nothing": b"h\x07",
    "an empty stack": b"R",
    "marks without end": b"((((",
    "a key that is a list": b"}]Ns",
    "items of text": text("a") + b"Na",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_programs_are_refused(folder, case):
    code = b"\x80\x02}" + text("w") + HOSTILE[case] + b"s."
    with pytest.raises(CheckpointError, match=r"model\.pt: data\.pkl: "):
        folder(code)


def test_a_large_memo_index_allocates_nothing():
    """The C unpickler allocates a memo of the size of the largest index."""
    code = b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b"."
    assert read_pickle(code, "x") == {}


def test_a_recursive_dict_is_read_or_refused():
    code = b"\x80\x02}q\x00" + text("model") + b"h\x00s."
    found = read_pickle(code, "x")
    assert found["model"] is found


@pytest.mark.parametrize("length", range(0, 190, 7))
def test_a_truncated_pickle_is_refused(length):
    whole = program(PLAIN)
    with pytest.raises(CheckpointError, match="x: not a whole pickle"):
        read_pickle(whole[: min(length, len(whole) - 1)], "x")


def test_changed_programs_are_read_or_refused(depth):
    rng, outcomes = np.random.default_rng(0), Outcomes()
    whole = bytearray(program(PLAIN))
    for _ in range(depth(200, 2_000)):
        spoiled = bytearray(whole)
        for place in rng.integers(0, len(whole), rng.integers(1, 4)):
            spoiled[place] = rng.integers(0, 256)
        with outcomes.refused_by(CheckpointError):
            read_pickle(bytes(spoiled), "x")
    outcomes.check()


BAD = {
    "behind the storage": (
        {"w": tensor((3, 4), (4, 1), size=12, offset=1)}, {},
        "tensor 'w': ends 4 bytes behind its storage of 48 bytes",
    ),
    "a size that the file contradicts": (
        {"w": tensor((3, 5), (5, 1), size=15)}, {}, "ends 12 bytes behind its storage"
    ),
    "columns first": (
        {"w": tensor((3, 4), (1, 3))}, {}, r"found strides \(1, 3\) for shape \(3, 4\)"
    ),
    "all one element": (
        {"w": tensor((3, 4), (0, 0))}, {}, r"found strides \(0, 0\)"
    ),
    "too few strides": ({"w": tensor((3, 4), (1,))}, {}, "found strides"),
    "an absent member": (
        {"w": tensor((3, 4), (4, 1), key="../1")}, {},
        "storage '../1': missing; accepted: a mem"
    ),
    "too large a shape": (
        {"w": tensor((2**30, 2**30), (2**30, 1), size=12)}, {},
        r"at most 8 axes, fewer than 2\*\*48 elements"
    ),
    "no tensor": ({"w": number(3)}, {}, "'w': found a int; accepted: tensors by name"),
    "nothing": ({}, {}, "found a dict; accepted: a dict of tensors"),
    "the other order": (PLAIN, {"order": b"big"}, "byteorder: found b'big'"),
    "compressed": (PLAIN, {"compress": 8}, "is compressed or encrypted"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_archives_are_refused(folder, case):
    items, options, sentence = BAD[case]
    with pytest.raises(CheckpointError, match=sentence):
        folder(program(items), **options)


def test_files_in_other_formats_are_refused(folder, tmp_path):
    folder(program(PLAIN))
    path = tmp_path / "model.pt"
    whole = path.read_bytes()
    for data in (b"", pickle.dumps({}), whole[:200], whole[:-4], b"\x00" * 64):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="not a zip archive"):
            open_checkpoint(tmp_path)


def test_duplicate_members_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("a/data.pkl", program(PLAIN))
        archive.writestr("b/data.pkl", program(PLAIN))
    with pytest.raises(CheckpointError, match=r"found 2 members named data\.pkl"):
        open_checkpoint(tmp_path)


def test_changed_archives_are_read_or_refused(folder, tmp_path, depth):
    folder(program(PLAIN))
    path = tmp_path / "model.pt"
    whole = path.read_bytes()
    rng, outcomes = np.random.default_rng(0), Outcomes()
    for _ in range(depth(100, 800)):
        spoiled = bytearray(whole)
        for place in rng.integers(0, len(whole), rng.integers(1, 4)):
            spoiled[place] = rng.integers(0, 256)
        path.write_bytes(bytes(spoiled))
        with outcomes.refused_by(CheckpointError):
            found = open_checkpoint(tmp_path)
            for each in found.names():
                found.tensor(each).data.sum()
    outcomes.check()
