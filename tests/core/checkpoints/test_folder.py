from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.files.safetensors import DTYPES
from inl.dtypes import widen
from inl.errors import CheckpointError

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 2}))
    return tmp_path


def index(folder, weight_map):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_tensors_equal_what_the_reference_package_wrote(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, values in tensors.items():
        assert checkpoint.spec(name) == ("float32", values.shape)
        array = checkpoint.tensor(name)
        assert np.array_equal(array.data, values)
        assert not array.data.flags.owndata
    checkpoint.close()


NUMPY_DTYPES = [
    name
    for name in DTYPES.values()
    if name != "bfloat16" and not name.startswith("float8")
]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_is_read(folder, dtype):
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    save_file({"odd": values}, folder / "model.safetensors")
    found = open_checkpoint(folder).tensor("odd")
    assert found.dtype == dtype
    assert np.array_equal(found.data, values)


def by_hand(header, data):
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_bfloat16_is_read(folder):
    header = {"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}
    raw = by_hand(header, bytes.fromhex("803f 00c0 497f"))
    (folder / "model.safetensors").write_bytes(raw)
    found = open_checkpoint(folder).tensor("x")
    assert (found.dtype, found.shape) == ("bfloat16", (3,))
    assert widen(found).tolist() == [1.0, -2.0, float.fromhex("0x1.92p127")]


def test_unaligned_tensors_are_read(folder):
    values = np.arange(4, dtype=np.float64)
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F64", "shape": [4], "data_offsets": [3, 35]},
    }
    raw = by_hand(header, b"abc" + values.tobytes())
    (folder / "model.safetensors").write_bytes(raw)
    found = open_checkpoint(folder).tensor("b")
    assert found.data.flags.aligned
    assert np.array_equal(found.data, values)


def test_shards_are_joined(folder, tensors):
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index(folder, {name: file for file, part in halves.items() for name in part})
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == names
    for name in names:
        assert np.array_equal(checkpoint.tensor(name).data, tensors[name])


def test_the_index_chooses_the_shard_of_a_tensor_that_two_have(folder):
    for file, value in (("a.safetensors", 1), ("b.safetensors", 2)):
        shared = np.full(2, value, np.float32)
        save_file({"shared": shared, file[0]: shared}, folder / file)
    placed = {"a": "a.safetensors", "b": "b.safetensors"}
    index(folder, placed | {"shared": "b.safetensors"})
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.names()) == ["a", "b", "shared"]
    assert list(checkpoint.tensor("shared").data) == [2, 2]
    index(folder, placed)
    with pytest.raises(CheckpointError, match=r"'shared': also in .*each tensor once"):
        open_checkpoint(folder)


def test_tensors_of_a_shard_that_the_index_lacks_are_read(folder):
    ones = np.ones(2, np.float32)
    save_file({"x": ones, "y": ones}, folder / "a.safetensors")
    index(folder, {"x": "a.safetensors"})
    assert sorted(open_checkpoint(folder).names()) == ["x", "y"]


@pytest.mark.parametrize(
    ("weight_map", "parts"),
    [
        ({"x": "../a.safetensors"}, ["'x'", "../a.safetensors", "same folder"]),
        ({"x": "/etc/passwd"}, ["/etc/passwd"]),
        ({"x": 3}, ["found 3"]),
        (
            {"x": "gone.safetensors", "y": "a.safetensors"},
            ["'gone.safetensors': not in the folder", "one of 1 of 2", "download"],
        ),
        ({"x": "a.safetensors"}, ["'x'", "a.safetensors", "index"]),
        ([], ["weight_map", "[]"]),
        (None, ["weight_map", "None"]),
    ],
)
def test_an_invalid_index_is_refused(folder, weight_map, parts):
    save_file({"y": np.zeros(1, np.float32)}, folder / "a.safetensors")
    index(folder, weight_map)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_end_tokens_of_both_configs_are_merged(folder):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert open_checkpoint(folder).eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize("found", ["2", -1, [1, "x"], True, 1.5, {}])
def test_end_tokens_of_a_wrong_type_are_refused(folder, found):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*eos_token_id"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "line 1, column 1"),
        ("{", "line 1"),
        ('{"a": 1,}', "not JSON"),
        ("[1, 2]", "JSON list"),
        ('"x"', "JSON str"),
        ("null", "NoneType"),
        ("[" * 100_000, "nested 100000 levels"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000"),
        (r'{"a": "\ud800"}', "half of a surrogate pair"),
        (b"\xff\xfe{", "not JSON"),
    ],
)
def test_a_config_that_is_not_a_json_object_is_refused(folder, text, part):
    raw = text if isinstance(text, bytes) else text.encode()
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        open_checkpoint(folder)
    assert part in str(caught.value)
    assert "accepted" in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"model": {"type": 3}}'])
def test_an_invalid_tokenizer_file_is_refused(folder, text):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*accepted"):
        open_checkpoint(folder).tokenizer()


def test_a_missing_tokenizer_is_named(folder):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": "{{ eos_token }}!", "eos_token": "<e>"},
        {"chat_template": "{{ eos_token }}!", "eos_token": {"content": "<e>"}},
        {
            "chat_template": [
                {"name": "tools", "template": "no"},
                {"name": "default", "template": "{{ eos_token }}!"},
            ],
            "eos_token": "<e>",
        },
    ],
)
def test_the_chat_template_of_the_settings(folder, settings):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = open_checkpoint(folder).chat_template
    assert template.apply([]) == "<e>!"


def test_the_chat_template_for_tools_of_the_settings(folder):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ eos_token }}{{ tools }}"},
    ]
    settings = {"chat_template": templates, "eos_token": "<e>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = open_checkpoint(folder).chat_template
    assert template.apply([]) == "plain"
    assert template.apply([], tools=[1]) == "<e>[1]"


def test_the_chat_template_of_its_own_file_comes_first(folder):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (folder / "chat_template.jinja").write_text("new")
    assert open_checkpoint(folder).chat_template.source == "new"


def test_no_chat_template_is_none(folder):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    assert open_checkpoint(folder).chat_template is None


@pytest.mark.parametrize("settings", [{"chat_template": 3}, {"chat_template": {}}])
def test_a_chat_template_of_a_wrong_type_is_refused(folder, settings):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        _ = open_checkpoint(folder).chat_template


def test_two_models_in_a_folder_are_refused(folder):
    for name in ("a", "b"):
        save_file({"x": np.zeros(1, np.float32)}, folder / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors"):
        open_checkpoint(folder)


def test_a_missing_tensor_is_named(folder):
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for ask in (checkpoint.spec, checkpoint.tensor):
        with pytest.raises(CheckpointError, match="'nope'"):
            ask("nope")


def test_a_path_without_a_model_is_refused(tmp_path, tiny_gguf):
    (tmp_path / "lone.safetensors").write_bytes(b"x" * 99)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"x")
    for name, part in {
        "gone": "no such file or folder",
        "lone.safetensors": "config.json",
        "notes.txt": "b'hell'",
        "empty": "found nothing",
        "pickles": "pytorch_model.bin",
        "x" * 5000: "cannot be read",
        "nul\0": "no such file or folder",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / name)
        assert part in str(caught.value)
        assert (
            ".gguf" in str(caught.value)
            or "config.json" in str(caught.value)
            or (part == "cannot be read")
        )


def test_a_folder_with_one_gguf_is_that_file(tiny_gguf):
    assert open_checkpoint(tiny_gguf.parent).path == tiny_gguf
    renamed = tiny_gguf.rename(tiny_gguf.with_suffix(".bin"))
    assert open_checkpoint(renamed).path == renamed
