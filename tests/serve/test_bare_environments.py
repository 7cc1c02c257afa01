"""Whole commands where little is given: no home, an ASCII locale, marks of UTF-8."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from safetensors.numpy import save_file

from byte_tokens import byte_rules
from depth import mostly_full
from inl.testing.tiny import tiny_llama
from waiting import until

UNKNOWN = ("HOME", "LANG", "INL_CACHE", "LC_CTYPE", "LOGNAME", "USER", "USERNAME")

NO_USER = """
import os, pwd

def unknown(*_):
    raise KeyError("no such user")

pwd.getpwuid = pwd.getpwnam = unknown
os.getlogin = unknown
"""

TEMPLATE = "{% for m in messages %}<begin>{{ m.content }}<end>{% endfor %}é"

READY = re.compile(rb" at (http\S+),")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model over bytes, whose text files all begin with the mark."""
    folder = tmp_path_factory.mktemp("marks") / "tiny é"
    folder.mkdir()
    config, tensors = tiny_llama(np.random.default_rng(11), vocab=258, kv_heads=2)
    save_file(tensors, folder / "model.safetensors")
    rules = byte_rules()
    rules.add_special_tokens(["<begin>", "<end>"])
    special = {"bos_token": "<begin>", "eos_token": "<end>"}
    files = {
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps({"temperature": 0.5}),
        "tokenizer.json": rules.to_str(),
        "tokenizer_config.json": json.dumps(special),
        "special_tokens_map.json": json.dumps(special),
        "chat_template.jinja": TEMPLATE,
    }
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8-sig")
    return folder


@pytest.fixture(params=mostly_full(["ascii", "latin-1"]))
def bare(request, tmp_path):
    """The environment of a process whose user has no name and no home."""
    (tmp_path / "sitecustomize.py").write_text(NO_USER)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in UNKNOWN and not name.startswith("XDG_")
    }
    return {
        **kept,
        "PYTHONPATH": path,
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": request.param,
        "TMPDIR": str(tmp_path),
    }


def command(*words):
    return [sys.executable, "-m", "inl", *map(str, words)]


def done(env, folder, *words, **options):
    """Run a command in an empty folder; return what it has printed."""
    run = subprocess.run(
        command(*words),
        env=env,
        cwd=folder,
        capture_output=True,
        check=False,
        **options,
    )
    assert run.returncode == 0, run.stderr.decode("utf-8", "replace")
    assert b"Traceback" not in run.stderr
    return run.stdout


def test_devices_are_listed(bare, tmp_path):
    assert b"cpu:0" in done(bare, tmp_path, "devices")


@pytest.mark.full
def test_text_is_generated(bare, tmp_path, model):
    options = ("--model", model, "--device", "cpu", "--max-tokens", 4)
    assert done(bare, tmp_path, "generate", "Hé", *options)
    (tmp_path / "prompt").write_text("Hé", "utf-8-sig")
    with (tmp_path / "prompt").open("rb") as file:
        found = json.loads(
            done(bare, tmp_path, "generate", "-", "--json", *options, stdin=file)
        )
    # <begin>, three bytes, <end>, and two bytes of the template.
    assert found["prompt_tokens"] == 7


@pytest.mark.full
def test_a_file_of_requests_is_answered(bare, tmp_path, model):
    request = {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 4}
    line = {"custom_id": "é", "url": "/v1/chat/completions", "body": request}
    text = json.dumps(line, ensure_ascii=False)
    (tmp_path / "in é.jsonl").write_text(text, "utf-8-sig")
    files = "in é.jsonl", "out.jsonl"
    done(bare, tmp_path, "run-batch", *files, "--model", model, "--device", "cpu")
    answer = json.loads((tmp_path / "out.jsonl").read_bytes())
    assert answer["custom_id"] == "é"
    assert answer["response"]["body"]["usage"]["prompt_tokens"] == 7


@pytest.mark.full
def test_a_server_answers(bare, tmp_path, model):
    key = tmp_path / "keys"
    key.write_text("# é\nsecret\n", "utf-8-sig")
    key.chmod(0o600)
    words = ("--model", model, "--device", "cpu", "--port", 0, "--api-key", f"@{key}")
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("serve", *words, "--files", tmp_path / "files"),
            env=bare, cwd=tmp_path, stderr=output,
        )  # fmt: skip
    try:
        until(lambda: READY.search(log.read_bytes()) or process.poll() is not None)
        found = READY.search(log.read_bytes())
        assert found, log.read_text("utf-8", "replace")
        body = {"messages": [{"role": "user", "content": "Hé"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{found[1].decode()}/v1/chat/completions",
            json.dumps(body).encode(),
            {"authorization": "Bearer secret"},
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        assert answer["usage"]["prompt_tokens"] == 7
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
