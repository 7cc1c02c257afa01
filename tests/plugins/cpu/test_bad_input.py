"""Damaged model files and small machines, through the public engine."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.gguf.file import GgufFile
from inl.checkpoints.hub.resolve import default_model
from inl.errors import CheckpointError
from inl_cpu.library import open_library

ORACLE = Path(__file__).parents[2] / "data" / "smollm2-oracle.json"
TENSOR = b"blk.3.ffn_down.weight"
Q4_1, Q8_1 = 3, 9

pytestmark = pytest.mark.skipif(
    open_library().library is None, reason=open_library().reason
)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A copy of the default model, to be damaged."""
    monkeypatch.setenv("INL_CPU_PACKED", "off")
    return Path(shutil.copy(default_model(), tmp_path / "damaged.gguf"))


def start(path):
    InferenceEngine.from_pretrained(path, EngineConfig(backend="cpu")).close()


def test_an_unsupported_block_format(model):
    """A tensor with a valid position whose block format is unknown."""
    tensors = GgufFile(model).tensors
    last = max(
        (name for name, entry in tensors.items() if entry.dtype == "q4_1"),
        key=lambda name: tensors[name].start,
    )
    with model.open("r+b") as file:
        head = file.read(4 << 20)
        # The name is followed by rank, two sizes, and kind.
        at = head.index(last.encode()) + len(last) + 4 + 16
        assert struct.unpack_from("<I", head, at) == (Q4_1,)
        file.seek(at)
        file.write(struct.pack("<I", Q8_1))
        # Blocks of that kind are longer: move the next tensor after them.
        norm = b"output_norm.weight"
        at = head.index(norm) + len(norm) + 4 + 8 + 4
        (offset,) = struct.unpack_from("<Q", head, at)
        file.seek(at)
        file.write(struct.pack("<Q", offset + (1 << 20)))
    os.truncate(model, 2 * model.stat().st_size)
    with pytest.raises(
        CheckpointError, match=r"found q8_1; accepted: .*q4_1"
    ) as caught:
        start(model)
    assert "damaged.gguf: tensor 'model.layers.9.self_attn.v_proj.weight'" in str(
        caught.value
    )


def test_a_truncated_file(model):
    whole = model.stat().st_size
    os.truncate(model, whole // 2)
    with pytest.raises(CheckpointError, match=r"damaged\.gguf: tensor .* in the file"):
        start(model)


def test_a_misaligned_tensor(model):
    with model.open("r+b") as file:
        head = file.read(4 << 20)
        at = head.index(TENSOR) + len(TENSOR) + 4 + 16 + 4
        (offset,) = struct.unpack_from("<Q", head, at)
        file.seek(at)
        file.write(struct.pack("<Q", offset + 2))
    with pytest.raises(CheckpointError, match=r"offset: found \d+; .*multiples of 32"):
        start(model)


PROGRAM = """
import os, sys, json
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from inl import EngineConfig, InferenceEngine
engine = InferenceEngine.from_pretrained(None, EngineConfig(backend="cpu"))
found = engine.generate(json.loads(sys.argv[1]), max_tokens=4)
threads = engine.runner._backend.emitter.machine.threads
print(json.dumps([list(found.token_ids), threads]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_one_core_is_enough():
    case = json.loads(ORACLE.read_text("utf-8"))["cases"][0]
    environment = {key: at for key, at in os.environ.items() if key != "INL_THREADS"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(case["prompt_ids"])]
    out = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout) == [case["token_ids"][:4], 1]
