"""A draft model on another device than its target changes no output."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafted import REQUESTS, outputs, told
from inl import EngineConfig, InferenceEngine
from inl.errors import RequestError
from inl.testing.tiny import tiny_llama

VOCAB = 96
WORKER = f"worker:{sys.executable}/reference"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a target and of a model that is nearly the same."""
    config, tensors = tiny_llama(np.random.default_rng(5), vocab=VOCAB)
    rng = np.random.default_rng(1)
    made = []
    for noise in (0.0, 0.01):
        folder = tmp_path_factory.mktemp("model")
        changed = {
            name: (x + noise * rng.standard_normal(x.shape)).astype(np.float32)
            for name, x in tensors.items()
        }
        save_file(changed, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        made.append(folder)
    return made


def run(folder, **settings):
    """Outputs at temperatures 0 and 0.8, and the speculation."""
    config = EngineConfig(max_batch=2, context=64, dtype="float32", **settings)
    with InferenceEngine.from_pretrained(folder, config) as engine:
        return told(outputs(engine, VOCAB, REQUESTS[:2])), engine.speculation


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "draft_backend"),
    [(WORKER, "cpu:0"), pytest.param("cpu:0", WORKER, marks=pytest.mark.full)],
    ids=["target in a worker", "draft in a worker"],
)
def test_a_draft_on_another_device_changes_no_output(folders, backend, draft_backend):
    target, draft = folders
    plain, _ = run(target, backend="reference")
    found, speculation = run(
        target, backend=backend, speculation="model", draft_model=draft,
        draft_backend=draft_backend, max_drafts=3, adaptive_drafts=False,
    )  # fmt: skip
    assert found == plain
    assert speculation.drafted >= speculation.accepted > 5


@pytest.mark.full
def test_a_draft_head_beside_a_worker_is_refused(folders, tmp_path):
    from eagle_heads import random_head, written

    target = json.loads((folders[0] / "config.json").read_text())
    head = random_head(np.random.default_rng(8), target, taps=(0, 1))
    with pytest.raises(RequestError, match="found 'eagle' on worker:"):
        run(
            folders[0], backend=WORKER, speculation="eagle", max_drafts=3,
            adaptive_drafts=False, draft_model=written(tmp_path, *head),
        )  # fmt: skip
