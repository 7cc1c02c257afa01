"""GGUF files and folders that INL writes, of every family, against transformers.

Logits of the written file, read by INL, are those of torch; files are readable by the
``gguf`` package, folders by transformers, and greedy tokens of both forms are equal.
"""

from __future__ import annotations

import importlib
import json

import gguf
import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import default_model
from inl.convert.gguf_fields import READ_ONLY
from inl.convert.gguf_source import source_of_gguf, source_of_model
from inl.convert.write_folder import write_folder
from inl.convert.write_gguf import write_gguf
from inl.errors import CheckpointError
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
families = importlib.import_module("families")

BOUND = 1e-4
FORMS = {
    name: form for name, form in families.GGUF_FORMS.items() if form[0] not in READ_ONLY
} | {
    "mixtral": ("llama", {}),
    "qwen3-moe": ("qwen3moe", {}),
}
"""Family: its ``general.architecture``, and fields that such files can say."""
MIXTURES = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2,
                            "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 32, "head_dim": 16,
                               "norm_topk_prob": True}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def mixtures():
    """Families of experts, which other tests make in a way of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, (kind, fields) in MIXTURES.items():
            patch.setitem(families.FAMILIES, name, (kind, families.rope() | fields))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model as saved by transformers and as GGUF, made once."""
    found = {}

    def get(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            one = families.make(name, folder, **FORMS[name][1])
            path = folder.with_suffix(".gguf")
            write_gguf(source_of_model(open_model(folder)), path, None)
            found[name] = one, path
        return found[name]

    return get


def logits(path, one):
    runner = families.load(open_model(path), families.reference(), "float64")
    return families.logits(runner, one.ids)


@pytest.mark.parametrize("name", FORMS)
def test_a_gguf_file_has_the_logits_of_transformers(name, made):
    one, path = made(name)
    assert families.distance(logits(path, one), one.logits) < BOUND


@pytest.mark.parametrize("name", FORMS)
def test_the_gguf_package_reads_names_and_types(name, made):
    _, path = made(name)
    reader = gguf.GGUFReader(path)
    archs = {stored: arch for arch, stored in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(archs[FORMS[name][0]], families.LAYERS)
    stored = {known.get_name(each.name, (".weight", ".bias")) or each.name
              for each in reader.tensors}  # fmt: skip
    assert stored == {each.name for each in reader.tensors}
    assert reader.get_field("general.architecture").contents() == FORMS[name][0]
    for each in reader.tensors:
        if len(each.shape) == 1:
            assert each.tensor_type == gguf.GGMLQuantizationType.F32
    layers = reader.get_field(f"{FORMS[name][0]}.block_count")
    assert layers.types == [gguf.GGUFValueType.UINT32]
    theta = reader.get_field(f"{FORMS[name][0]}.rope.freq_base")
    assert theta.types == [gguf.GGUFValueType.FLOAT32]


def test_a_folder_of_gpt_oss_is_refused(made, tmp_path):
    _, path = made("gpt-oss")
    with pytest.raises(CheckpointError, match="found 'gpt-oss', which is not convert"):
        write_folder(open_model(path), tmp_path / "folder")


@pytest.mark.parametrize("name", [name for name in FORMS if name != "gpt-oss"])
def test_a_folder_of_a_gguf_file_is_read_by_transformers(name, made, tmp_path):
    one, path = made(name)
    folder = tmp_path / "folder"
    write_folder(open_model(path), folder)
    assert families.distance(logits(folder, one), one.logits) < BOUND
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        found = model(torch.tensor([one.ids])).logits[0].numpy()
    assert families.distance(found, one.logits) < BOUND


@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "granite", "smollm3"])
def test_what_gguf_cannot_say_is_refused(name, tmp_path):
    folder = tmp_path / "folder"
    families.make(name, folder)
    target = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"window|model_type: found|'model_type'"):
        write_gguf(source_of_model(open_model(folder)), target, None)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder"]


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_recurrent_families_are_refused(name, tmp_path):
    families.make(name, tmp_path / "folder")
    with pytest.raises(CheckpointError, match="is not written as GGUF; accepted: arc"):
        source_of_model(open_model(tmp_path / "folder"))


def add_tokenizer(folder):
    """Byte-level BPE with merges, as of GPT-2, over the 96 ids of the tiny models."""
    rules = tokenizers.Tokenizer(tokenizers.models.BPE())
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    letters = [chr(code) for code in range(97, 123)] + ["\u0120", ",", ".", "'", "0"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=families.VOCAB - 4, initial_alphabet=letters,
        special_tokens=["<pad>", "<begin>", "<end>"], show_progress=False,
    )  # fmt: skip
    text = "the quick brown fox jumps over the lazy dog, and the end. it's 0"
    rules.train_from_iterator([text] * 9, trainer)
    rules.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokens = {"bos_token": "<begin>", "eos_token": "<end>", "pad_token": "<pad>"}
    settings = tokens | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def greedy(path):
    config = EngineConfig(backend="reference", dtype="float32", context=64)
    with InferenceEngine.from_pretrained(path, config) as engine:
        found = engine.generate("the lazy fox", max_tokens=16, ignore_eos=True)
        messages = [{"role": "user", "content": "the dog"}]
        return found.token_ids, engine.chat_ids(messages)


@pytest.mark.parametrize("name", ["llama3-published", "qwen3", "olmo2", "qwen3-moe"])
def test_greedy_tokens_and_prompts_are_equal_in_every_form(name, tmp_path):
    folder = tmp_path / "model"
    families.make(name, folder, **FORMS[name][1])
    add_tokenizer(folder)
    path, again = tmp_path / "m.gguf", tmp_path / "again"
    write_gguf(source_of_model(open_model(folder)), path, None)
    write_folder(open_model(path), again)
    expected = greedy(folder)
    assert len(set(expected[0])) > 3, "not one token again and again"
    assert greedy(path) == expected
    assert greedy(again) == expected
    model = transformers.AutoTokenizer.from_pretrained(again)
    assert model("the lazy fox")["input_ids"] == model.encode("the lazy fox")
    reader = gguf.GGUFReader(path)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert tokens[1:3] == ["<begin>", "<end>"]
    assert tokens[-1].startswith("[PAD")
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2"


@pytest.mark.parametrize("name", ["llama3-published", "gemma2"])
def test_a_copied_gguf_file_has_all_tensors_and_values(name, made, tmp_path):
    _, path = made(name)
    copy = tmp_path / "copy.gguf"
    write_gguf(source_of_gguf(path), copy, None)
    ours, theirs = gguf.GGUFReader(copy), gguf.GGUFReader(path)
    assert {key: (field.types, field.contents()) for key, field in ours.fields.items()
            if not key.startswith("GGUF.")} == {
        key: (field.types, field.contents()) for key, field in theirs.fields.items()
        if not key.startswith("GGUF.")}  # fmt: skip
    found = {each.name: each.data for each in ours.tensors}
    for each in theirs.tensors:
        assert np.array_equal(found.pop(each.name), each.data)
    assert not found


ABOUT = ("basename", "finetune", "languages", "license", "name", "organization",
         "size_label", "file_type")  # fmt: skip
"""Keys below ``general`` that describe where a model is from, and its kind."""


def test_a_real_model_has_the_metadata_of_llama_cpp_s_converter(tmp_path):
    """The default model is a file of llama.cpp: as a folder, and as a file again."""
    original = default_model()
    write_folder(open_model(original), tmp_path / "folder")
    path = tmp_path / "m.gguf"
    write_gguf(source_of_model(open_model(tmp_path / "folder")), path, None)
    theirs, ours = gguf.GGUFReader(original), gguf.GGUFReader(path)
    left_out = {f"general.{name}" for name in ABOUT}
    left_out.add("tokenizer.ggml.add_space_prefix")  # of SentencePiece's kind only
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF.") and key not in left_out:
            assert ours.get_field(key) is not None, key
            assert ours.get_field(key).types == field.types, key
            assert ours.get_field(key).contents() == field.contents(), key
    found = {each.name: each for each in ours.tensors}
    assert set(found) == {each.name for each in theirs.tensors}
    for each in theirs.tensors:
        values = gguf.dequantize(each.data, each.tensor_type)
        written = gguf.dequantize(found[each.name].data, found[each.name].tensor_type)
        written = written.reshape(values.shape)
        np.testing.assert_allclose(written, values, rtol=2.0**-8, err_msg=each.name)
