"""Commands with the default model on the CPU backend."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import default_model
from inl.plugin import make_backend


@pytest.fixture(scope="module")
def inl():
    default_model()  # fetched outside of any command's time limit

    def run(*words, **options):
        return subprocess.run(
            [sys.executable, "-m", "inl", *words],
            capture_output=True,
            text=True,
            timeout=300,
            **options,
        )

    return run


def test_the_doctor_finds_that_the_default_model_can_run(inl):
    done = inl("doctor", "--json")
    assert done.returncode == 0, done.stdout
    checks = {row["subject"]: row for row in json.loads(done.stdout)["checks"]}
    assert checks["model"]["status"] == "ok"
    assert checks["device cpu:0"]["status"] == "ok"
    assert checks["torch"]["finding"]


def test_ops_names_the_kernels_of_the_cpu(inl):
    rows = json.loads(inl("ops", "--device", "cpu", "--json").stdout)
    found = {
        (row["op"], name) for row in rows for name in row["kernels"].get("cpu", ())
    }
    kernels = make_backend("cpu").kernels()
    assert found == {(kernel.op, kernel.name) for kernel in kernels}


def test_a_benchmark_on_the_cpu(inl):
    options = (
        "--prompt-tokens",
        "32",
        "--tokens",
        "6",
        "--batch",
        "1,2",
        "--runs",
        "1",
    )
    done = inl("bench", "--device", "cpu", "--dtype", "float32", "--json", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    one, two = report["batches"]
    # 134.5 million parameters as the file packs them; the cache is small. Where torch
    # computes they have 4 bytes each.
    packed = 96e6 < one["bytes_per_token"] < 103e6
    assert packed or 538e6 < one["bytes_per_token"] < 545e6
    assert two["bytes_per_token"] == pytest.approx(one["bytes_per_token"] / 2, rel=0.03)
    assert 0 < one["share_of_bandwidth"] < 1.5
    assert report["peak_host_bytes"] > one["bytes_per_token"]


def test_a_chat_remembers_until_the_context_is_full(inl, tmp_path):
    fixed = ("chat", "--device", "cpu", "--dtype", "float32", "--temperature", "0")
    options = ("--max-tokens", "12", "--context", "160")
    kept = tmp_path / "kept.json"
    lines = f"My name is Ada. Say hello.\nSay it once more.\n/save {kept}\n"
    done = inl(*fixed, *options, input=lines)
    assert done.returncode == 0
    assert set(done.stderr.splitlines()) <= {"[stopped at 12 tokens; --max-tokens]"}
    *said, answer = json.loads(kept.read_text())["messages"]
    config = EngineConfig(backend="cpu", dtype="float32", context=160)
    with InferenceEngine.from_pretrained(config=config) as engine:
        whole = engine.generate(engine.chat_ids(said), max_tokens=12).text
        forgetful = engine.generate(engine.chat_ids(said[-1:]), max_tokens=12).text
    assert answer["content"] == whole
    assert whole != forgetful
    done = inl(*fixed, *options, input=lines + "Count to ten.\n" * 6)
    assert done.returncode == 0
    assert "no longer fit into 160 tokens)" in done.stderr
