"""Checkpoints of floats that are quantized when they are read, from both formats."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.checkpoints.digest import model_digest
from inl.errors import RequestError
from inl.executor.model_loader import open_model
from quantized_blocks import decoded

NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_gguf_file_of_floats(tmp_path, gguf_writer, tensors, kind):
    """Rows of q are put in order before they are quantized."""
    path = tmp_path / "model.gguf"
    gguf_writer(path, tensors, kind=gguf.GGMLQuantizationType[kind])
    language = open_model(path).quantized("int8")
    stored = language.checkpoint.tensor(NAME)
    assert (stored.dtype, stored.shape) == ("q8_0", tensors[NAME].shape)
    error = np.abs(decoded(stored) - tensors[NAME]).max()
    assert error < np.abs(tensors[NAME]).max() * (1 / 127 if kind != "BF16" else 1 / 64)
    quantization = language.quantization
    assert len(quantization.layers) == 14
    assert quantization.rms_error < 0.01
    assert language.checkpoint.files() == (path,)
    language.checkpoint.close()


def test_a_gguf_file_of_blocks_is_refused(tmp_path, gguf_writer, tensors):
    path = tmp_path / "model.gguf"
    gguf_writer(path, tensors, kind=gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(RequestError, match=r"model.gguf is quantized already: q8_0; a"):
        open_model(path).quantized("int4")


def test_kinds_have_digests_of_their_own(tmp_path, gguf_writer, tensors):
    """So that blocks of a prefix cache, and traces, are those of one kind."""
    path = tmp_path / "model.gguf"
    gguf_writer(path, tensors)
    language = open_model(path)
    kinds = [language.quantized(kind) for kind in ("int8", "fp8", "int4")]
    digests = {model_digest(each.checkpoint) for each in (language, *kinds)}
    assert len(digests) == 4
