"""Peak memory of loading, measured in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

HIDDEN, INNER, LAYERS, VOCAB = 1024, 2816, 7, 4000
STATUS = Path("/proc/self/status")

PROGRAM = """
import sys
from pathlib import Path

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models import llama
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.folder import FolderCheckpoint
from inl.weights.plan import plan_weights
from inl.weights.load import load_weights, stored_specs

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

kept = []
if sys.argv[2] == "keep":
    read = FolderCheckpoint.tensor
    FolderCheckpoint.tensor = lambda *args: kept.append(read(*args)) or kept[-1]
checkpoint = open_checkpoint(sys.argv[1])
config = llama.config(checkpoint.config)
backend = ReferenceBackend(Device("reference:0"))
groups = plan_weights(llama.weights(config), (), stored_specs(checkpoint))
before = memory("VmRSS")
weights = load_weights(groups, checkpoint, backend, "float32")
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A float16 Llama of 180 MB, twice as large in float32."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        shapes |= {
            f"{stem}.input_layernorm.weight": (HIDDEN,),
            f"{stem}.post_attention_layernorm.weight": (HIDDEN,),
            **{
                f"{stem}.self_attn.{one}_proj.weight": (HIDDEN, HIDDEN)
                for one in "qkvo"
            },
            f"{stem}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{stem}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{stem}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
        shapes |= dict.fromkeys(
            (f"{stem}.self_attn.{one}_proj.weight" for one in "qkvo"), (HIDDEN, HIDDEN)
        )
    tensors = {name: np.ones(shape, np.float16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def peak(folder, how):
    command = [sys.executable, "-c", PROGRAM, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(not STATUS.exists(), reason="the system has no /proc/self/status")
def test_peak_memory_is_near_the_size_of_the_weights(folder, capsys):
    size = (folder / "model.safetensors").stat().st_size
    used = 2 * size
    found, kept = peak(folder, "drop"), peak(folder, "keep")
    with capsys.disabled():
        print(
            f"\nloading {used >> 20} MiB of tensors from {size >> 20} MiB: peak "
            f"{found >> 20} MiB, {kept >> 20} MiB if tensors were kept"
        )
    assert used < found < 1.25 * used
    assert kept > 1.4 * used
