"""An engine over a worker in another virtual environment, killed and rebuilt."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import inl
from byte_tokens import byte_rules
from inl import EngineConfig, InferenceEngine
from inl.cli.main import main
from inl.errors import (
    BackendNotFound,
    BackendUnavailable,
    DeviceError,
    OutOfMemory,
    WorkerLost,
)
from inl.protocol.runner import Limits, Reply
from inl.recording.trace_file import read_trace
from inl.runners.worker_runner import WorkerRunner
from inl.testing.tiny import plain_logits, tiny_llama

ONLY_THERE = """
import sys
from inl.testing.hash_runner import HashRunner
from inl.protocol.wire_json import read_limits
from inl.runners.startup import StartedRunner

def serve(options, progress):
    runner = HashRunner(read_limits(options["limits"], "options"))
    return StartedRunner(runner, sys.prefix, "")
"""


@pytest.fixture(scope="module")
def other_python(tmp_path_factory):
    """The interpreter of a fresh environment that sees our packages by a .pth file."""
    folder = tmp_path_factory.mktemp("other") / "a venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    here = [str(Path(inl.__file__).parents[1]), *site.getsitepackages()]
    (packages / "shared.pth").write_text("\n".join(here))
    (packages / "only_there.py").write_text(ONLY_THERE)
    return str(folder / "bin" / "python")


@pytest.fixture(autouse=True)
def no_python_path(monkeypatch):
    """The other environment finds its packages by itself."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(scope="module")
def made():
    return tiny_llama(np.random.default_rng(5), vocab=256, kv_heads=2)


@pytest.fixture(scope="module")
def model(made, tmp_path_factory):
    """A model's folder with a tokenizer whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny model"
    folder.mkdir()
    config, tensors = made
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    byte_rules().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def engine(model, other_python):
    """Make an engine over a worker, unless told otherwise."""
    made = []

    def begin(**settings):
        settings = {"backend": f"worker:{other_python}/reference:0"} | settings
        config = EngineConfig(**({"max_batch": 4, "context": 96} | settings))
        made.append(InferenceEngine.from_pretrained(model, config))
        return made[-1]

    yield begin
    for each in made:
        each.close()


PROMPTS = ["hello", "a longer prompt, in words", "x"]
DRAWN = {"max_tokens": 24, "temperature": 1.2, "seed": 7, "ignore_eos": True}


def greedy(made, ids, count):
    """What an uncached float64 computation, written apart from ours, answers."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(plain_logits(*made, ids)[-1].argmax()))
    return tuple(ids[-count:])


def test_it_is_the_other_environment(other_python):
    limits = Limits(3, (9,), 4, 8, 100)
    runner = WorkerRunner(
        other_python, {"limits": asdict(limits)}, factory="only_there:serve"
    )
    assert Path(runner.device) == Path(other_python).parents[1] != Path(sys.prefix)
    runner.close()


def test_the_same_tokens_greedy_and_drawn(engine, made, other_python):
    far, near = engine(), engine(backend="reference")
    assert far.device == f"worker:{other_python}/reference:0"
    found = far.generate(PROMPTS, max_tokens=12)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert answer.token_ids == greedy(made, prompt_ids(far, prompt), 12)
    drawn = [each.generate(PROMPTS, **DRAWN) for each in (far, near)]
    assert [a.token_ids for a in drawn[0]] == [a.token_ids for a in drawn[1]]
    assert "".join(far.stream("hello", **DRAWN)) == near.generate("hello", **DRAWN).text


def prompt_ids(engine, prompt):
    return engine.tokenizer.encode(prompt)


@pytest.mark.parametrize("options", [{"max_tokens": 24}, DRAWN])
def test_killed_in_mid_stream_and_rebuilt(engine, options):
    wanted = engine(backend="reference").generate("tell me", **options).text
    far = engine(on_worker_loss="restart")
    stream = far.stream("tell me", **options)
    pieces = [next(stream) for _ in range(5)]
    os.kill(far.runner.pid, signal.SIGKILL)
    pieces += stream
    assert "".join(pieces) == wanted
    assert far.core.restarts == 1
    assert far.generate("tell me", **options).text == wanted


def test_several_live_requests_go_on(engine):
    wanted = engine(backend="reference").generate(PROMPTS, **DRAWN)
    far = engine(on_worker_loss="restart", max_batch=2)
    answers = [far.submit(prompt, **DRAWN) for prompt in PROMPTS]
    for _ in range(6):
        far.step()
    os.kill(far.runner.pid, signal.SIGKILL)
    while not all(answer.completed for answer in answers):
        far.step()
    assert [tuple(answer.token_ids) for answer in answers] == [
        answer.token_ids for answer in wanted
    ]
    assert far.core.restarts == 1


def test_rebuilt_on_another_device(engine):
    wanted = engine(backend="reference").generate("tell me", **DRAWN).text
    far = engine(on_worker_loss="restart", restart_device="reference")
    stream = far.stream("tell me", **DRAWN)
    pieces = [next(stream) for _ in range(5)]
    os.kill(far.runner.pid, signal.SIGKILL)
    assert "".join([*pieces, *stream]) == wanted
    assert far.device == "reference:0"


def test_killed_in_mid_stream_and_raised(engine):
    far = engine()
    stream = far.stream("tell me", **DRAWN)
    for _ in range(3):
        next(stream)
    os.kill(far.runner.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"SIGKILL.*on_worker_loss='restart'"):
        list(stream)


def test_what_the_other_environment_cannot_do(engine, other_python):
    # Not installed there, or listed there without its modules.
    missing = BackendNotFound, BackendUnavailable
    with pytest.raises(missing, match=r"worker .*inl-rocm"):
        engine(backend=f"worker:{other_python}/rocm:0")
    with pytest.raises(OutOfMemory, match="1,000 are allowed"):
        engine(cache_bytes=1000)
    with pytest.raises(DeviceError, match="does not exist"):
        engine(backend="worker:/nowhere/bin/python/cpu:0")


def traced(out, model, device, *, tokens, temperature=0.0):
    """Write a trace; returns the exit code."""
    options = {
        "--out": out, "--model": model, "--device": device, "--max-tokens": tokens,
        "--temperature": temperature,
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    return main(["trace", "say", "--raw", *words])


def test_a_trace_through_a_worker_replayed_here(model, other_python, tmp_path, capsys):
    out = tmp_path / "answer.trace"
    device = f"worker:{other_python}/reference"
    assert traced(out, model, device, tokens=9, temperature=0.9) == 0
    capsys.readouterr()
    assert main(["replay", str(out)]) == 0
    said = capsys.readouterr().out
    assert "9 steps, 9 rows compared, 0 skipped" in said
    assert "every token is the same" in said
    assert main(["replay", str(out), "--device", device, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []


def test_a_planted_difference_ends_with_status_1(model, tmp_path, capsys):
    out = tmp_path / "answer.trace"
    assert traced(out, model, "reference", tokens=9) == 0
    last = [each for each in read_trace(out) if isinstance(each, Reply)][-1]
    data = bytearray(out.read_bytes())
    data[-4] ^= 1  # the only token of the last reply
    out.write_bytes(data)
    assert main(["replay", str(out)]) == 1
    token = int(last.tokens[0, 0])
    said = capsys.readouterr().out
    assert "first difference: step 9, row 0: sequence 1 (slot" in said
    assert f"recorded {token ^ 1}, replayed {token}" in said


def test_another_model_is_refused(model, tmp_path, made, capsys):
    out = tmp_path / "answer.trace"
    assert traced(out, model, "reference", tokens=2) == 0
    tensors = made[1]
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    norm = tensors["model.norm.weight"] * 1.01
    save_file(tensors | {"model.norm.weight": norm}, other / "model.safetensors")
    assert main(["replay", str(out), "--model", str(other)]) == 2
    assert "was recorded with" in capsys.readouterr().err
