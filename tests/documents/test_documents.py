"""Every Python block of the documents that INL replaces, with their root changed.

``tests/data/documents`` holds the blocks. A block runs after the earlier ones of its
document, with what it leaves undefined, on arrays of JAX, NumPy and torch.
``OUTCOMES`` lists those that do not simply run: JAX refuses some as written, and an
absent TPU is refused by a sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from byte_tokens import bytes_as_tokens
from document_blocks import DOCUMENTS, JAX_ONLY, Document, blocks
from inl.device import Device
from inl.errors import DeviceError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl_toolkit.nn import place

jax = pytest.importorskip("jax")
pytest.importorskip("torch")

SUPPORT = Path(__file__).parents[1] / "support"
NO_TPU = (DeviceError, "pip install .*inl-tpu|no TPU")
OUTCOMES = {
    ("tpu_devices", 3): NO_TPU,
    ("tpu_devices", 4): NO_TPU,
    ("tpu_devices", 5): NO_TPU,
    ("tpu_devices", 6): NO_TPU,
    # Errors of JAX: the block is not valid for it.
    ("tpu_optimized_kernels", 1): (ValueError, "len.axis_names. == 3"),
    ("tpu_optimized_kernels", 5): (ModuleNotFoundError, "jax.checkpoint"),
    ("tpu_optimized_kernels", 6): (TypeError, "log_dir"),
}
"""(document, block) -> the error and its message, without a TPU."""


def tiny_model():
    """A language model and its tokenizer, of bytes."""
    checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=256))
    config = MODEL.config(checkpoint.config)
    return LanguageModel(MODEL, config, checkpoint), bytes_as_tokens()


def run_expected(document, number):
    outcome = OUTCOMES.get((document.name, number))
    if outcome is None or (outcome is NO_TPU and Device("tpu").is_available()):
        document.run(number)
        return
    kind, message = outcome
    with pytest.raises(kind, match=message):
        document.run(number)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block(name):
    document = Document(name, tiny_model)
    for number in range(len(blocks(name))):
        run_expected(document, number)


@pytest.mark.parametrize("array_kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["kernels", "tpu_kernels", "tpu_optimized_kernels"])
def test_every_block_on_other_arrays(name, array_kind):
    document = Document(name, tiny_model, array_kind)
    numbers = [n for n in range(len(blocks(name))) if (name, n) not in JAX_ONLY]
    assert numbers
    for number in numbers:
        document.run(number)


@pytest.mark.parametrize("array_kind", ["numpy", "torch", "jax"])
def test_dynamics_on_every_kind_of_array(array_kind):
    Document("tpu_inl", tiny_model, array_kind).run(0)


def test_the_blocks_on_a_device_that_stands_for_a_tpu(request, monkeypatch):
    """The blocks that need a TPU, on a JAX backend under its name."""
    module = request.getfixturevalue("jax_module")
    monkeypatch.setattr(place, "make_backend", module.jax_backend())
    place.place_of.cache_clear()
    document = Document("tpu_devices", tiny_model)
    try:
        for number in (3, 4, 5, 6):
            document.run(number)
        assert isinstance(document.names["c"].array, jax.Array)
    finally:
        place.place_of.cache_clear()


@pytest.mark.long
def test_the_blocks_of_tpus_under_the_tpu_interpreter():
    """On inl-tpu, with its Pallas attention, in a process whose TPU is interpreted."""
    pytest.importorskip("inl_tpu")
    done = subprocess.run(
        [sys.executable, SUPPORT / "tpu_documents.py"],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("blocks 10, pallas True\n"), done.stdout
