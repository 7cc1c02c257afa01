"""The packages of examples/plugins: built, installed without a network, and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from inl.testing.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/plugins").iterdir())
LEFT = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
SSH = """#!/bin/sh
# Runs the command here; its last word is what the other host's shell would get.
for word in "$@"; do last=$word; done
printf '%s\\n' "$*" > "$0.words"
exec sh -c "$last"
"""


def run(*words, **settings):
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=580,
        **settings,
    )


def needed(name, found):
    """Add the names of a distribution and of what it needs, as it is installed here."""
    key = re.sub("[-_.]+", "-", name).lower()
    try:
        requirements = distribution(key).requires or []
    except PackageNotFoundError:  # for another system
        return found
    if key not in found:
        found.add(key)
        for each in requirements:
            if "extra ==" not in each:
                needed(re.match(r"[\w.-]+", each)[0], found)
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A fresh environment with the core's wheel and those of the examples."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheels")
    for path in (ROOT / "core", *EXAMPLES):
        shutil.copytree(path, tree / path.name, ignore=LEFT)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    done = run(*wheel, "-w", folder, *sorted(tree.iterdir()))
    assert done.returncode == 0, done.stderr
    place = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", "--without-pip", place).returncode == 0
    target = ["--python", place / "bin" / "python", "install", "-q", "--no-index"]
    done = run(*pip, *target, "--no-deps", "--no-compile", *folder.glob("*.whl"))
    assert done.returncode == 0, done.stderr
    (packages,) = place.glob("lib/python*/site-packages")
    names = set()
    for name in ("numpy", "pluggy", "typer", "rich", "jinja2", "tokenizers"):
        needed(name, names)
    for name in names:
        for file in distribution(name).files:
            top = file.parts[0]
            source = Path(distribution(name).locate_file(top))
            if top != ".." and top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(source)
    ssh = place / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    return place


@pytest.fixture(scope="module")
def inl(installed, tmp_path_factory):
    """Run ``inl`` of the environment, or with ``code`` its Python."""
    cache = tmp_path_factory.mktemp("cache")
    dropped = ("PYTHONPATH", "INL_PLUGINS", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["INL_CACHE"] = str(cache)
    env["PATH"] = f"{installed / 'bin'}{os.pathsep}{env['PATH']}"

    def call(*words, code=None):
        program = ["inl"] if code is None else ["python", "-c", code]
        done = run(installed / "bin" / program[0], *program[1:], *words, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama over bytes: a folder with ``weights.npz``, and one beside it."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    folder.mkdir()
    config, tensors = tiny_llama(np.random.default_rng(11), vocab=256, kv_heads=2)
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    rules = tokenizers.Tokenizer(
        tokenizers.models.BPE({each: at for at, each in enumerate(alphabet)}, [])
    )
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    rules.decoder = tokenizers.decoders.ByteLevel()
    rules.save(str(folder / "tokenizer.json"))
    np.savez(folder / "weights.npz", **tensors)
    return folder


def answer(inl, model, *words):
    line = inl(
        "generate", "abc", "--raw", "--model", model, "--max-tokens", "6",
        "--temperature", "0", "--json", *words,
    )  # fmt: skip
    return json.loads(line)["token_ids"]


@pytest.fixture(scope="module")
def wanted(model):
    """The greedy tokens after "abc", by the formulas of a plain Llama."""
    from inl.testing.tiny import plain_logits

    config, tensors = tiny_llama(np.random.default_rng(11), vocab=256, kv_heads=2)
    rules = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = rules.encode("abc").ids
    for _ in range(6):
        ids.append(int(plain_logits(config, tensors, ids)[-1].argmax()))
    return ids[-6:]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_less_than_60_lines(path):
    lines = [file.read_text().splitlines() for file in path.rglob("*.py")]
    assert 20 < sum(map(len, lines)) < 60


def test_all_of_them_are_ready(inl):
    rows = {row["distribution"]: row for row in json.loads(inl("plugins", "--json"))}
    found = {name: (row["status"], row["detail"]) for name, row in rows.items()}
    assert found.pop("inl-core")[0] == "ready"
    assert found == {
        "inl-corpus": ("ready", "drafter corpus"),
        "inl-npz": ("ready", "format .npz"),
        "inl-ssh": ("ready", "place ssh"),
        "inl-sticky": ("ready", "router sticky"),
        "inl-tokens": ("ready", "command tokens"),
    }


def test_a_command(inl, model, tmp_path):
    assert "\nCommands of inl-tokens 0.1.0:\n  tokens " in inl("--help")
    file = tmp_path / "text"
    file.write_text("seven b")
    assert inl("tokens", file, "--model", model / "weights.npz").split() == [
        "7", str(file),
    ]  # fmt: skip


def test_a_format(inl, model, wanted):
    path = model / "weights.npz"
    assert answer(inl, path, "--device", "reference") == wanted
    facts = json.loads(inl("models", path, "--json"))
    assert facts["architecture"] == "LlamaForCausalLM"


def test_a_place(inl, installed, model, wanted):
    path = model / "weights.npz"
    assert answer(inl, path, "--device", "ssh:me@far/reference:0") == wanted
    words = (installed / "bin/ssh.words").read_text()
    assert re.match(
        r"-o ExitOnForwardFailure=yes -R (\d+):127\.0\.0\.1:\1 -- me@", words
    )
    assert re.search("[0-9a-f]{64}", words) is None


CORPUS = """
import json, sys
from inl import EngineConfig, InferenceEngine
config = EngineConfig(
    backend="reference", speculation="corpus", draft_model=sys.argv[2],
    max_drafts=4, adaptive_drafts=False,
)
with InferenceEngine.from_pretrained(sys.argv[1], config=config) as engine:
    handle = engine.submit("abc", max_tokens=6, temperature=0)
    while not handle.completed:
        engine.step()
    counts = engine.speculation.drafted, engine.speculation.accepted
    print(json.dumps([list(handle.completion().token_ids), *counts]))
"""


def test_a_drafter(inl, model, wanted, tmp_path):
    """The corpus has the answer, so drafts of it are accepted."""
    rules = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("nothing of it")
    line = inl(model / "weights.npz", corpus, code=CORPUS)
    assert json.loads(line) == [wanted, 0, 0]
    corpus.write_text("abc" + rules.decode(wanted), "utf-8")
    tokens, drafted, accepted = json.loads(
        inl(model / "weights.npz", corpus, code=CORPUS)
    )
    assert tokens == wanted
    assert drafted >= accepted > 0


ROUTER = """
import json, sys
from inl.cli.serve_router import make_plugin_router
from inl.fleet.plugin_router import ReplicaLoad, RoutedPrompt

def load(number, open=0):
    return ReplicaLoad(
        number=number, address=f"host:{number}", device="cpu:0", places=4, open=open,
        queued_tokens=0, cached_tokens=0, seconds_per_token=0.0,
    )

def prompt(first, last):
    tokens = [first] * 64 + [last]
    return RoutedPrompt(tokens=tokens, output_tokens=0, client="", model=None)

def choices(loads):
    found = [router.choose(prompt(each // 2, each), loads) for each in range(80)]
    return [each and each.number for each in found]

router = make_plugin_router("sticky")
loads = [load(number) for number in range(4)]
busy = [load(2, 8), *loads[:2]]
print(json.dumps([choices(loads), choices(loads[1:]), choices(busy),
                  choices([load(1, 8)])]))
"""


def test_a_router(inl):
    """Prompts that begin alike have one engine; one that is lost moves only its own."""
    found, without, busy, full = json.loads(inl(code=ROUTER))
    assert found[::2] == found[1::2]
    assert set(found) == {0, 1, 2, 3}
    kept = [(one, two) for one, two in zip(found, without, strict=True) if one]
    assert all(one == two for one, two in kept)
    assert 2 not in busy
    assert full == [None] * 80
