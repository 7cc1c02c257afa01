"""Generated files: each is read or refused by name, in bounded time and memory."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from depth import mostly_full
from fuzz_reports import reports
from inl.checkpoints.gguf.file import GgufFile
from structure_texts import CONFIG

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measured with /proc")

WORKER = Path(__file__).with_name("structure_worker.py")
KINDS = ("pickle", "gguf", "config", "tokenizer", "template")
SECONDS = 5.0
"""Processor time of a case."""
OVERHEAD = 64 << 20
"""Bytes that a case may take beside three times its file."""
SHARDS = 4


@pytest.fixture
def folder(tmp_path, tensors, tiny_gguf):
    """The valid files that the cases begin with."""
    for kind in KINDS:
        (tmp_path / kind).mkdir()
    save_file(tensors, tmp_path / "config" / "model.safetensors")
    (tmp_path / "config" / "valid.json").write_text(json.dumps(CONFIG))
    file = GgufFile(tiny_gguf)
    model = {
        "metadata": [pair(*item) for item in file.metadata.items()],
        "tensors": [
            (name, entry.shape, file.file.read(entry.start, entry.stop).hex())
            for name, entry in file.tensors.items()
        ],
    }
    (tmp_path / "gguf" / "gguf.json").write_text(json.dumps(model))
    return tmp_path


def pair(key, value):
    """Key, type and value of metadata."""
    if isinstance(value, str):
        return key, 8, value
    if isinstance(value, float):
        return key, 6, value
    if isinstance(value, int):
        return key, 4, value
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    return key, 9, (8 if isinstance(items[0], str) else 5, items)


def complaint(report):
    """What is wrong with how a case went; empty if nothing is."""
    result, message = report["result"], report["message"]
    if result == "ended":
        killed = report["status"] == -signal.SIGXCPU
        return "" if killed else f"the process ended: {report['status']} {message}"
    if result == "odd":
        return message
    if report["seconds"] > SECONDS:
        return f"took {report['seconds']:.1f} seconds"
    if report["grown"] > 3 * report["size"] + OVERHEAD:
        return f"took {report['grown']} bytes for a file of {report['size']}"
    where = "/" + report["kind"]
    if result == "refused" and (where not in message or len(message) > 5000):
        return f"does not name the file: {message[:800]}"
    return ""


@pytest.mark.parametrize("shard", mostly_full(range(SHARDS)))
def test_generated_files_are_read_or_refused(shard, folder, depth, capsys):
    cases = depth(200, 500, 12_500)
    first = shard * cases
    complaints, counts = [], defaultdict(Counter)
    slowest, largest = 0.0, 0
    found = reports(WORKER, [folder], folder, first, first + cases)
    for number, report in enumerate(found, first):
        kind = report.setdefault("kind", KINDS[number % len(KINDS)])
        counts[kind][report["result"]] += 1
        slowest = max(slowest, report.get("seconds", 0.0))
        largest = max(largest, report.get("grown", 0) - 3 * report.get("size", 0))
        if what := complaint(report):
            complaints.append((number, kind, what))
    with capsys.disabled():
        shown = {kind: dict(counts[kind]) for kind in KINDS}
        print(
            f"\n{cases} generated files: {shown}, slowest {slowest:.2f} s, memory at "
            f"most 3 times the file + {max(largest, 0) >> 20} MiB"
        )
    assert complaints == [], (len(complaints), complaints[:5])
    for kind in KINDS:
        assert sum(counts[kind].values()) == cases // len(KINDS)
        assert counts[kind]["ok"] >= cases // 100
        assert counts[kind]["refused"] >= cases // 100
        assert not counts[kind]["ended"] or kind == "template"


FINE = {
    "kind": "gguf", "result": "refused",
    "message": "E: /x/gguf/tiny.gguf: no; accepted: y", "seconds": 0.1,
    "grown": 1 << 20, "size": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"result": "odd", "message": "KeyError: 'x'"},
        {"result": "ended", "message": "", "status": -signal.SIGSEGV},
        {"seconds": SECONDS + 0.1},
        {"grown": OVERHEAD + 301},
        {"message": "CheckpointError: found x; accepted: y"},
    ],
)
def test_what_would_be_complained_about(change):
    assert complaint(FINE) == ""
    assert complaint(FINE | change) != ""
