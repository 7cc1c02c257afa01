"""Random damage: whatever a file holds, an error of ours or a result, fast and small.

A case follows from its number: ``fuzz_worker.py KIND FOLDER 7 8`` runs one again.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from safetensors.numpy import save

from fuzz_reports import reports
from structure_texts import CONFIG

SECONDS = 30.0
"""Time limit of a case: it would hang, on a slow and busy machine as well."""
CONSTANT = 64 << 20
"""Bytes that a case may take beside three times its file."""
DATA = Path(__file__).parents[2] / "data"
WORKER = Path(__file__).with_name("fuzz_worker.py")

TEMPLATES = [
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | "
    "trim }}{% if not loop.last %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{- bos_token }}{%- set ns = namespace(found=false) -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.found = true -%}{%- endif -%}"
    "{{- m.role ~ ': ' ~ m.content ~ '\\n' -}}{%- endfor -%}"
    "{%- if not ns.found -%}{{- raise_exception('no system') if tools else '' -}}"
    "{%- endif -%}",
    "{%- macro turn(role, content) -%}[{{ role | upper }}] {{ content | tojson }}"
    "{%- endmacro -%}{% for m in messages[::-1] %}{{ turn(m.role, m.content) }}"
    "{{ ' ' * 4 }}{{ '%05d' % loop.index }}{% endfor %}",
]


@pytest.fixture
def folder(tmp_path, tiny_gguf, tensors):
    """A valid file of each kind."""
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    settings = {"chat_template": TEMPLATES[0], "bos_token": {"content": "<s>"}}
    for name, value in {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": 1},
        "tokenizer_config.json": settings,
        "model.safetensors.index.json": index,
        "templates.json": TEMPLATES,
    }.items():
        (tmp_path / name).write_text(json.dumps(value))
    (tmp_path / "model.safetensors").write_bytes(save(tensors))
    write_tokenizers(tmp_path)
    return tmp_path


def write_tokenizers(folder):
    from inl.text.gguf_vocabulary import read_tokenizer

    pieces = json.loads((DATA / "sentencepiece-bpe.json").read_text("utf-8"))[1]
    common = {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    given = [
        {
            "model": "gpt2",
            "pre": "qwen2",
            "tokens": ["<s>", "</s>", "a", "b", "ab", "aba", "c"],
            "token_type": [3, 3, 1, 1, 1, 4, 1],
            "merges": ["a b"],
            **common,
        },
        {
            "model": "llama",
            "tokens": pieces["tokens"],
            "scores": pieces["scores"],
            "token_type": pieces["types"],
            **common,
        },
    ]
    metadata = [
        {f"tokenizer.ggml.{key}": value for key, value in one.items()} for one in given
    ]
    (folder / "metadata.json").write_text(json.dumps(metadata))
    for name, fields in zip(("bytes.json", "pieces.json"), metadata, strict=True):
        read_tokenizer(fields, name).rules.save(str(folder / name))


def complaint(kind, report):
    """What is wrong with how a case went; empty if nothing is."""
    message = report["message"]
    if report["result"] == "odd":
        return message
    if report["result"] == "ended":
        # A template may end its process: whoever asked it then says so in an error.
        ended = kind == "template" and report["status"] == -signal.SIGXCPU
        return "" if ended else f"the process died or hung: {message}"
    if report["seconds"] > SECONDS:
        return f"took {report['seconds']:.1f} seconds"
    if report["grown"] > 3 * report["size"] + CONSTANT:
        return f"took {report['grown']} bytes for a file of {report['size']}"
    if report["result"] == "refused":
        if len(message) > 5000 or not PLACES[kind].search(message):
            return f"place or length: {message[:800]}"
        if not ACCEPTED.search(message):
            return f"what is accepted: {message[:800]}"
    return ""


PLACES = {
    "gguf": re.compile(r"tiny\.gguf"),
    "safetensors": re.compile(r"model\.safetensors|: tensors do not fit"),
    "config": re.compile(r"\.json|\.safetensors|config field|: tensors do not fit"),
    "tokenizer": re.compile(r"tokenizer\.json|fuzz\.gguf"),
    "template": re.compile("chat template"),
}
ACCEPTED = re.compile(
    "accepted|expected|registered:|missing|unused|the template raised|not even"
)


@pytest.mark.parametrize("kind", PLACES)
def test_damaged_input_gives_a_result_or_an_inl_error(kind, folder, capsys, depth):
    cases = depth(150, 800, 5_000)
    complaints, counts, slowest, largest = [], {}, 0.0, 0
    for number, report in enumerate(reports(WORKER, [kind, folder], folder, 0, cases)):
        counts[report["result"]] = counts.get(report["result"], 0) + 1
        slowest = max(slowest, report.get("seconds", 0.0))
        largest = max(largest, report.get("grown", 0) - 3 * report.get("size", 0))
        if what := complaint(kind, report):
            complaints.append((number, what))
    with capsys.disabled():
        print(
            f"\n{cases} damaged {kind} files: {counts}, slowest {slowest:.2f} s, "
            f"memory at most 3 times the file + {max(largest, 0) >> 20} MiB"
        )
    assert complaints == [], complaints[:5]
    assert sum(counts.values()) == cases
    assert counts.get("refused", 0) > cases // 4
    assert counts.get("ok", 0) > 0
    assert counts.get("ended", 0) < cases // 20


FINE = {
    "result": "refused",
    "message": "CheckpointError: tiny.gguf: found x; accepted: y",
    "seconds": 0.1,
    "grown": 1 << 20,
    "size": 100,
}


@pytest.mark.parametrize(
    "change",
    [
        {"result": "odd", "message": "KeyError: 'x'"},
        {"result": "ended", "message": "Segmentation fault", "status": -11},
        {"seconds": 30.1},
        {"grown": CONSTANT + 301},
        {"message": "CheckpointError: found x; accepted: y"},
        {"message": "CheckpointError: tiny.gguf: found x"},
        {"message": FINE["message"] + "x" * 6000},
    ],
)
def test_what_would_be_complained_about(change):
    assert complaint("gguf", FINE) == ""
    assert complaint("gguf", FINE | change) != ""
