"""``--quantize`` of every command that loads a model."""

from __future__ import annotations

import io
import json
import sys

import pytest

from inl.cli.main import main

ERROR = "inl: tiny-chat: int8: 4 matrices quantized, 0.1 MB -> 0.0 MB; relative RMS"
SKIPPED = "int8: 10 matrices stay as stored, because their rows of 48 are not a mult"


def run(capsys, command, folder, *words, device="reference"):
    options = ["--model", str(folder), "--quantize", "int8", "--device", device]
    code = main([*command.split(), *words, *options])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate", ["hello", "--max-tokens", "2"]),
        ("chat", ["--max-tokens", "2"]),
        ("bench", ["--prompt-tokens", "4", "--tokens", "2", "--batch", "1", "--runs",
                   "1"]),
        ("bench mix", ["--loads", "first-32", "--scale", "0.01"]),
    ],
)  # fmt: skip
def test_errors_and_what_stays_are_printed(
    capsys, monkeypatch, tiny_folder, command, words
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    code, out, err = run(capsys, command, tiny_folder, *words)
    assert code == 0, err
    assert out.strip()
    assert ERROR in err
    assert SKIPPED in err


def test_text_of_quantized_weights_is_another(capsys, tiny_folder):
    words = ["generate", "hello", "--model", str(tiny_folder), "--device", "reference",
             "--json", "--max-tokens", "24"]  # fmt: skip
    found = []
    for kind in ([], ["--quantize", "int4"], ["--quantize", "int4"]):
        assert main([*words, *kind]) == 0
        found.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert found[0] != found[1] == found[2]


def test_explain_names_what_is_quantized(capsys, tiny_folder):
    code, out, _ = run(capsys, "explain", tiny_folder)
    assert code == 0
    assert "weights: int8: 4 matrices quantized to q8_0 when they are loaded; e" in out
    assert f"weights: {SKIPPED}" in out
    assert "weights: int8: 4 of the model's matrices are decoded to the comp" in out


def test_a_plan_counts_the_bytes_of_blocks(capsys, tiny_folder):
    def bytes_per_param(*words):
        plan = ["plan", "--devices", "1x8GB", "--json", str(tiny_folder)]
        assert main([*plan, *words]) == 0
        return json.loads(capsys.readouterr().out)["bytes_per_param"]

    values = [bytes_per_param("--quantize", each) for each in ("int8", "fp8", "int4")]
    assert 4 == bytes_per_param() > values[0] > values[1] > values[2]


def test_a_trace_is_replayed_with_its_kind(capsys, tiny_folder, tmp_path):
    trace = tmp_path / "a.trace"
    words = ["hi", "--out", str(trace), "--max-tokens", "4"]
    code, _, err = run(capsys, "trace", tiny_folder, *words)
    assert code == 0
    assert ERROR in err
    words = ["replay", str(trace), "--device", "reference"]
    assert main(words) == 2
    assert "with --model, and its --quantize" in capsys.readouterr().err
    assert main([*words, "--quantize", "int8"]) == 0
    assert "every token is the same" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate hello", "explain", "bench"])
def test_an_unknown_kind_is_refused(capsys, tiny_folder, command):
    options = ["--model", str(tiny_folder), "--device", "reference"]
    assert main([*command.split(), *options, "--quantize", "int3"]) == 2
    err = capsys.readouterr().err
    assert "quantize: found 'int3', accepted: None, fp8, int8, int4" in err
