"""Reading of files saved by torch."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from inl.checkpoints.checkpoint import open_checkpoint
from inl.dtypes import widen
from inl.executor.model_loader import open_model

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    def save(held, **options):
        (tmp_path / "config.json").write_text("{}")
        torch.save(held, tmp_path / "model.pt", **options)
        return open_checkpoint(tmp_path)

    return save


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype(saved, protocol):
    made = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in DTYPES}
    found = saved(made, pickle_protocol=protocol)
    assert found.names() == list(made)
    assert not any(found.tensor(name).data.flags.writeable for name in made), "mapped"
    for name, want in made.items():
        got = torch.tensor(widen(found.tensor(name)))
        assert torch.equal(got.to(want.dtype), want), name


def test_a_training_checkpoint(saved):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().T.contiguous()[:, :4])
    held = {"model_state_dict": model.state_dict(), "epoch": 3, "lr": [0.1, None, True]}
    found = saved({**held, "parameter": model[0].weight})
    for name, want in model.state_dict().items():
        assert torch.equal(torch.tensor(widen(found.tensor(name))), want)


def test_shared_and_sliced_storages(saved):
    whole = torch.arange(12.0)
    found = saved({"all": whole, "part": whole[4:8].view(2, 2), "again": whole})
    assert widen(found.tensor("part")).tolist() == [[4, 5], [6, 7]]
    assert widen(found.tensor("again")).tolist() == whole.tolist()


def test_a_model_in_a_torch_file(recorded, apart, tmp_path):
    known = recorded("inl-v013", "cpu")
    source = known.language.checkpoint.path
    stored = open_checkpoint(source)
    weights = {
        name.removeprefix("model."): torch.tensor(widen(stored.tensor(name)))
        for name in stored.names()
    }
    shutil.copy(source / "config.json", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 64
    torch.save({"model": weights, "step": 9}, tmp_path / "checkpoint.pt")
    again = recorded("inl-v013", "cpu", language=open_model(tmp_path))
    fed = again.runner()
    fed.admit(1)
    assert apart(fed((1, known.prompts[2]))[0], known.logits[2]) < 1e-4
