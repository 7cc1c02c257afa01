"""Special tokens and templates that only one of a model's files names."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.files import tensor_file
from inl.checkpoints.hub.hugging_face import parse_name, select_files
from inl.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    config = {"model_type": "llama", "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def write(folder, **files):
    for name, fields in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(fields), "utf-8")


ADDED = [{"id": 5, "content": "<end>"}, {"id": 6, "content": "<pad>"}]


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config": {
                "eos_token": {"content": "<end>"},
                "added_tokens_decoder": {"5": {"content": "<end>"}},
            }
        },
        {
            "tokenizer_config": {"eos_token": "<end>"},
            "tokenizer": {"added_tokens": ADDED, "model": {"vocab": {"<end>": 5}}},
        },
        {
            "tokenizer_config": {"eos_token": "<end>"},
            "tokenizer": {"model": {"vocab": {"a": 0, "<end>": 5}}},
        },
        {
            "special_tokens_map": {"eos_token": "<end>"},
            "tokenizer": {"added_tokens": ADDED},
        },
    ],
)
def test_the_end_token_of_the_tokenizer_ends_answers_too(folder, files):
    write(folder, **files)
    assert open_checkpoint(folder).eos_token_ids == (2, 5)


def test_a_tokenizer_has_the_tokens_that_files_name(folder):
    rules = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<end>": 1}, []))
    rules.save(str(folder / "tokenizer.json"))
    write(
        folder, tokenizer_config={"eos_token": "<end>"},
        special_tokens_map={"bos_token": "a"},
    )  # fmt: skip
    tokenizer = open_checkpoint(folder).tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("a", "<end>")


def test_an_end_token_that_no_file_numbers_changes_nothing(folder):
    write(folder, tokenizer_config={"eos_token": "<end>"}, tokenizer={"model": {}})
    assert open_checkpoint(folder).eos_token_ids == (2,)


def test_templates_have_every_named_special_token(folder):
    write(
        folder,
        tokenizer_config={
            "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|"
            "{{ unk_token }}|{{ mask_token is defined }}",
            "pad_token": {"content": "<pad>"},
        },
        special_tokens_map={"unk_token": "<unk>", "pad_token": "<other>"},
    )
    text = open_checkpoint(folder).chat_template.apply([])
    assert text == "||<pad>|<unk>|False"


def test_a_special_token_of_a_wrong_type_is_refused(folder):
    write(folder, special_tokens_map={"unk_token": 3})
    with pytest.raises(CheckpointError, match="unk_token: found 3"):
        open_checkpoint(folder)


def test_the_template_for_tools_in_its_own_file(folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (folder / "chat_template.jinja").write_text("plain", "utf-8-sig")
    template = open_checkpoint(folder).chat_template
    assert (template.apply([]), template.apply([], tools=[1])) == ("plain", "[1]")


def test_templates_of_the_settings_are_not_mixed_with_those_of_files(folder):
    templates = [{"name": "tool_use", "template": "old"}]
    write(folder, tokenizer_config={"chat_template": templates})
    (folder / "chat_template.jinja").write_text("new")
    assert open_checkpoint(folder).chat_template.apply([], tools=[1]) == "new"


def test_a_whole_file_is_read_and_not_the_index_of_absent_shards(folder):
    weight_map = {"x": "model-00001-of-00002.safetensors"}
    write(folder, **{"model.safetensors.index": {"weight_map": weight_map}})
    assert open_checkpoint(folder).names() == ["x"]


TEXTS = ["<s>", "</s>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "a"]
CONTROL, NORMAL = 3, 1


def gguf_file(path, **ids):
    """A file whose tokens ``TEXTS`` are of type control, but ``normal``."""
    normal, texts = ids.pop("normal", ("a",)), ids.pop("texts", TEXTS)
    writer = gguf.GGUFWriter(path, "none")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(texts)
    types = [NORMAL if text in normal else CONTROL for text in texts]
    writer.add_token_types(types)
    for name, value in ids.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_string
        add(f"tokenizer.{name}", value)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"ggml.eos_token_id": 1}, (1, 2, 4, 5)),
        ({"ggml.eos_token_id": 1, "texts": TEXTS[:4]}, (1, 2, 3)),
        ({"ggml.eos_token_id": 1, "normal": ("<|im_end|>", "a")}, (1, 4, 5)),
        ({"ggml.eos_token_id": 1, "ggml.eot_token_id": 6}, (1, 6)),
        ({"ggml.eos_token_id": 2}, (2,)),
    ],
)
def test_control_tokens_end_turns_where_a_gguf_names_none(tmp_path, fields, ends):
    checkpoint = gguf_file(tmp_path / "m.gguf", **fields)
    assert checkpoint.eos_token_ids == ends


def test_templates_of_a_gguf(tmp_path):
    checkpoint = gguf_file(
        tmp_path / "m.gguf",
        **{
            "ggml.eos_token_id": 1,
            "ggml.padding_token_id": 6,
            "chat_template": "{{ pad_token }}{{ eos_token }}{{ bos_token }}",
            "chat_template.tool_use": "{{ tools }}{{ eos_token }}",
        },
    )
    template = checkpoint.chat_template
    assert template.apply([]) == "a</s>"
    assert template.apply([], tools=[1]) == "[1]</s>"


def test_an_image_encoder_beside_a_gguf_is_not_a_second_model(tmp_path):
    gguf_file(tmp_path / "m.gguf")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert open_checkpoint(tmp_path).path == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "files", "selected"),
    [
        ("o/m", ["m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"], "m-Q8_0.gguf"),
        ("o/m:Q8_0", ["m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"], "m-Q8_0.gguf"),
        ("o/m", ["m-00001-of-00001.gguf"], "m-00001-of-00001.gguf"),
        ("o/m:Q4", ["Q4-00001-of-00001.gguf", "Q8.gguf"], "Q4-00001-of-00001.gguf"),
    ],
)
def test_the_gguf_of_a_repository(name, files, selected):
    assert select_files(parse_name(name), files) == [selected]


@pytest.mark.parametrize("part", ["00001-of-00002", "00010-of-00010"])
def test_a_part_of_a_split_gguf_is_refused(part):
    with pytest.raises(CheckpointError, match="a part of a split model"):
        select_files(parse_name("o/m"), [f"m-{part}.gguf"])


def test_each_file_is_read_once(folder, monkeypatch):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<end>": 1}, []))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<end>", "chat_template": "{{ eos_token }}"}
    write(
        folder, tokenizer_config=names, special_tokens_map={"bos_token": "a"},
        generation_config={"eos_token_id": 3}, added_tokens={},
    )  # fmt: skip
    opened = []
    real = tensor_file.open_regular

    def counted(path, folder=None):
        opened.append(path.name)
        return real(path, folder)

    monkeypatch.setattr(tensor_file, "open_regular", counted)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == (1, 2, 3)
    assert checkpoint.tokenizer() is checkpoint.tokenizer()
    assert checkpoint.chat_template is not None
    assert {"tokenizer.json", "special_tokens_map.json"} < set(opened)
    assert {name: opened.count(name) for name in opened if opened.count(name) > 1} == {}
