"""``inl quantize``, ``convert``, ``perplexity`` and ``embed`` as commands."""

from __future__ import annotations

import io
import json
import shutil
import sys

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inl import EngineConfig, InferenceEngine
from inl.cli.main import main

CONFIG = EngineConfig(backend="reference", dtype="float32", context=128, max_batch=2)
TEXT = "The quick brown fox; 12 dogs.\nAnd a line of its own, longer. " * 4


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """The tiny chat model with the pre-tokenizer of GPT-2, and tokens that end."""
    path = tmp_path_factory.mktemp("known") / "tiny"
    shutil.copytree(tiny_folder, path)
    rules = json.loads((path / "tokenizer.json").read_text())
    rules["pre_tokenizer"]["use_regex"] = True
    (path / "tokenizer.json").write_text(json.dumps(rules))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<begin>", "eos_token": "<end>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def run(capsys, *words):
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def greedy(path):
    with InferenceEngine.from_pretrained(path, CONFIG) as engine:
        return engine.generate(TEXT[:60], max_tokens=12, ignore_eos=True).token_ids


def test_a_converted_model_answers_the_same(capsys, folder, tmp_path):
    path, again = tmp_path / "m.gguf", tmp_path / "again"
    code, out, err = run(capsys, "convert", folder, path)
    assert code == 0, err
    assert out.startswith(f"{path}: 0.")
    assert gguf.GGUFReader(path).get_field("tokenizer.ggml.pre").contents() == "gpt-2"
    code, out, err = run(capsys, "convert", path, again, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["bytes"] == (again / "model.safetensors").stat().st_size
    assert facts["kind"] == "float32"
    assert greedy(path) == greedy(again) == greedy(folder)
    ours, theirs = (load_file(each / "model.safetensors") for each in (again, folder))
    assert {name: values.tobytes() for name, values in ours.items()} == {
        name: values.tobytes() for name, values in theirs.items()
    }


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "bf16"])
def test_a_quantized_gguf_file_runs(capsys, folder, tmp_path, kind):
    path = tmp_path / "m.gguf"
    words = ["--kind", kind.upper(), "--json"]  # as the names of published files
    code, out, err = run(capsys, "quantize", folder, path, *words)
    assert code == 0, err
    facts = json.loads(out)
    assert facts["kind"] == kind
    assert (facts["rms_error"] > 0) == (kind != "bf16")
    assert len(greedy(path)) == 12


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_quantized_folder_runs_with_its_tokenizer(capsys, folder, tmp_path, kind):
    path = tmp_path / "m"
    code, out, err = run(capsys, "quantize", folder, path, "--kind", kind)
    assert code == 0, err
    assert f"{kind}: " in out
    assert "relative RMS error of the weights" in out
    assert (path / "tokenizer.json").read_bytes() == (
        folder / "tokenizer.json").read_bytes()  # fmt: skip
    assert len(greedy(path)) == 12


def test_what_may_not_be_written_is_refused(capsys, folder, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")
    for words, message in (
        (["quantize", folder, path, "--kind", "q8_0"], "exists already; accepted: "),
        (["quantize", folder, folder, "--kind", "int8"], "found the input"),
        (["quantize", folder, path, "--kind", "int8"], "--kind: found 'int8' for "),
        (["quantize", folder, tmp_path / "f", "--kind", "q8_0"], "or an OUT that ends"),
        (["quantize", folder, tmp_path / "no" / "m.gguf", "--kind", "q8_0"],
         "found no folder"),
        (["quantize", folder, tmp_path / "f", "--kind", "int8", "--imatrix", path],
         "--imatrix: found int8, accepted: an OUT that is GGUF"),
        (["quantize", folder, path, "--kind", "q8_0", "--imatrix", tmp_path / "no"],
         "cannot be read"),
        (["convert", folder, path, "--dtype", "int8"], "--dtype: found 'int8'"),
    ):  # fmt: skip
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, ""), err
        assert message in err
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    code, _, err = run(capsys, "quantize", folder, path, "--kind", "q8_0", "--force")
    assert code == 0, err
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_tokenizer_that_gguf_cannot_say_is_refused(capsys, tiny_folder, tmp_path):
    code, _, err = run(capsys, "convert", tiny_folder, tmp_path / "m.gguf")
    assert code == 2
    assert "cannot be written as GGUF: found rules that split texts as no" in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def measured(capsys, model, text, *words):
    options = ["--device", "reference", "--dtype", "float32", "--json"]
    code, out, err = run(capsys, "perplexity", model, text, *options, *words)
    assert code == 0, err
    return json.loads(out)


def test_perplexity_is_that_of_log_probabilities(capsys, folder, text_file):
    found = measured(capsys, folder, text_file, "--context", "64")
    with InferenceEngine.from_pretrained(folder, CONFIG) as engine:
        ids = engine.tokenizer.encode(TEXT)
        losses = []
        for start in range(0, len(ids) - 63, 64):
            done = engine.generate(
                ids[start : start + 64], max_tokens=1, prompt_logprobs=0
            )
            losses += [-each.logprob for each in done.prompt_logprobs[33:]]
    assert found["chunks"] == len(ids) // 64 == 3
    assert found["scored"] == len(losses) == 3 * 31
    expected = np.exp(np.mean(losses))
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    error = expected * np.std(losses, ddof=1) / len(losses) ** 0.5
    assert found["error"] == pytest.approx(error, rel=1e-4)


def test_a_model_that_knows_nothing(capsys, folder, text_file, tmp_path):
    """Equal logits of 258 tokens: the perplexity is their number, without an error."""
    path = tmp_path / "zeros"
    shutil.copytree(folder, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][:] = 0
    save_file(tensors, path / "model.safetensors")
    found = measured(capsys, path, text_file, "--context", "33", "--chunks", "2")
    assert found["perplexity"] == pytest.approx(258, rel=1e-6)
    assert found["error"] == pytest.approx(0, abs=1e-4)
    assert (found["chunks"], found["scored"]) == (2, 2 * 16)


def test_each_chunk_begins_as_a_text_does(folder, tmp_path):
    from inl.cli.perplexity import chunks_of
    from inl.executor.model_loader import open_model

    path = tmp_path / "m"
    shutil.copytree(folder, path)
    rules = json.loads((path / "tokenizer.json").read_text())
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<begin>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {
            "<begin>": {"id": "<begin>", "ids": [256], "tokens": ["<begin>"]}},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(rules))
    language = open_model(path)
    ids = language.checkpoint.tokenizer().encode(TEXT)
    chunks = chunks_of(language, TEXT, 50)
    assert {len(each) for each in chunks} == {50}
    assert [each[0] for each in chunks] == [256] * (len(ids) // 50)
    assert chunks[1][1:] == ids[51:100]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "999"], "found 244 tokens, accepted: at least 999"),
        (["--context", "9999"], "--context: found 9999, accepted: 4 to 8192"),
    ],
)
def test_a_text_or_context_that_does_not_fit(capsys, folder, text_file, words, message):
    code, _, err = run(capsys, "perplexity", folder, text_file, *words)
    assert code == 2
    assert message in err


def test_perplexity_in_words(capsys, folder, text_file):
    words = ["--context", "64", "--device", "reference", "--quantize", "int8"]
    code, out, err = run(capsys, "perplexity", folder, text_file, *words)
    assert code == 0, err
    assert out.startswith("perplexity ")
    assert out.endswith("over 93 tokens: 3 chunks of 64, the second half of each\n")
    assert "int8: 4 matrices quantized" in err


def test_embeddings_of_arguments_lines_and_files(capsys, monkeypatch, folder, tmp_path):
    (tmp_path / "lines.txt").write_text("third\n\nfourth\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("second\n"))
    options = ["--device", "reference", "--dtype", "float32", "--context", "128"]
    words = [folder, "first", "-", f"@{tmp_path / 'lines.txt'}"]
    code, out, err = run(capsys, "embed", *words, *options)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    with InferenceEngine.from_pretrained(folder, CONFIG) as engine:
        expected = engine.embed(["first", "second", "third", "fourth"])
    found = np.array([row["embedding"] for row in rows])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    code, out, err = run(capsys, "embed", folder, "first", *options, "--json")
    assert code == 0, err
    (row,) = json.loads(out)["embeddings"]
    np.testing.assert_allclose(row, expected[0], atol=1e-6)


def test_embeddings_with_a_prompt_of_some_dimensions(capsys, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    prompts = {"prompts": {"query": "first "}, "default_prompt_name": None}
    place = tmp_path / "model" / "config_sentence_transformers.json"
    place.write_text(json.dumps(prompts))
    options = ["--device", "reference", "--dtype", "float32", "--context", "64"]
    words = [str(tmp_path / "model"), "text", *options]
    code, out, err = run(
        capsys, "embed", *words, "--dimensions", "5", "--prompt-name", "query"
    )
    assert code == 0, err
    with InferenceEngine.from_pretrained(folder, CONFIG) as engine:
        expected = engine.embed("first text")[0, :5]
    found = json.loads(out)["embedding"]
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-6)
    code, _, err = run(capsys, "embed", *words, "--prompt-name", "passage")
    assert code == 2
    assert "prompt_name: found 'passage', accepted: 'query'" in err


def test_more_texts_than_a_batch(capsys, folder):
    texts = [f"text {index}" for index in range(35)]
    options = ["--device", "reference", "--dtype", "float32", "--context", "64"]
    code, out, err = run(capsys, "embed", folder, *texts, *options)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["index"] for row in rows] == list(range(35))
    with InferenceEngine.from_pretrained(folder, CONFIG) as engine:
        np.testing.assert_allclose(
            rows[34]["embedding"], engine.embed(texts[34:])[0], atol=1e-6
        )


def test_no_texts_and_no_file(capsys, monkeypatch, folder):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    for word, message in (("-", "found no lines in -"), ("@/no/file", "No such file")):
        code, _, err = run(capsys, "embed", folder, word)
        assert code == 2
        assert message in err
