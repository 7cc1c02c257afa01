"""Random inputs of calls, and the calls of a model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.checkpoints.quantized.kv_cache_scheme import CacheScheme
from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import E4M3
from inl.errors import CheckpointError, RequestError
from inl.executor.load_plan import kernel_selection
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.spec.cache import Cache
from inl.spec.step import Step
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves
from inl.spec.workload import workload
from inl.testing.op_call import OpCall
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl.tune import models
from inl.tune.inputs import Inputs
from inl.tune.models import calls, filter_calls, plan_decoding

OPS = (
    "norm_qkv", "attend_project", "attend", "attention", "norm_mlp", "gated_mlp",
    "norm_logits", "linear", "qkv_linear", "rope", "rms_norm", "reduce_add_norm",
)  # fmt: skip


@pytest.fixture(scope="module")
def context():
    backend = ReferenceBackend(Device("reference"))
    return SimpleNamespace(
        backend=backend, selection=kernel_selection(backend, EngineConfig())
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    config, _ = tiny_llama(np.random.default_rng(3), kv_heads=2)
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def model_calls(context, model, rows=3):
    return calls(plan_decoding(context.backend, model, "float32", rows))


@pytest.mark.parametrize("op", OPS)
def test_inputs_belong_to_the_workload_of_the_call(context, path, op):
    matching = [call for call in model_calls(context, path) if call.spec.name == op]
    assert matching
    for call in matching:
        case = Inputs([1]).case(call.spec, call.args, call.attrs, length=20)
        op_call = OpCall(context, call.spec, case, "float32")
        assert workload(call.spec, op_call.specs, case.attrs) == call.work
        for arg in case.args:
            if not isinstance(arg, Step):
                floats = [leaf for leaf in leaves(arg) if leaf.dtype.kind == "f"]
                assert all(np.isfinite(leaf).all() for leaf in floats)
                assert all(leaf.std() > 0 for leaf in floats if leaf.size > 8)
        assert all(np.isfinite(leaf).all() for leaf in leaves(op_call.run()))


def test_rows_have_the_requested_cached_length(context, path):
    call = next(c for c in model_calls(context, path) if c.spec.name == "attention")
    step = call.args[2]
    for length, expected in ((20, 21), (10**6, 512)):
        made = Inputs([1]).case(call.spec, call.args, call.attrs, length=length)
        assert made.args[2].lengths.tolist() == [expected] * 3
        assert made.args[2].blocks.shape[2] >= step.blocks.shape[2]


def test_different_seeds_give_different_inputs(context, path):
    call = next(c for c in model_calls(context, path) if c.spec.name == "linear")
    one, same, other = (
        Inputs(seed).case(call.spec, call.args, call.attrs, length=1).args[0]
        for seed in ([1], [1], [2])
    )
    assert (one == same).all()
    assert (one != other).all()


def test_rows_count_up_to_a_power_of_two(context, path):
    def works(rows):
        return {
            c.work for c in model_calls(context, path, rows) if c.spec.name == "linear"
        }

    assert works(5) == works(8) != works(9)


def test_a_model_may_be_a_shape_a_config_or_a_folder(context, path, tmp_path):
    assert "norm_mlp" in {call.spec.name for call in model_calls(context, "8b")}
    with pytest.raises(CheckpointError, match=r"no\.json"):
        model_calls(context, str(tmp_path / "no.json"))


def test_calls_have_the_cache_that_an_engine_makes_of_the_checkpoint(
    context, monkeypatch
):
    """In its dtype; other kernels serve it."""
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(3), kv_heads=2))
    files.cache_scheme = CacheScheme(asked_by="kv_cache_scheme")
    language = LanguageModel(MODEL, MODEL.config(files.config), files)
    monkeypatch.setattr(models, "open_model", lambda _: language)
    monkeypatch.setattr(models, "resolve_model", lambda _: None)
    found = {
        arg.k.dtype
        for call in model_calls(context, "a folder")
        for arg in call.args
        if isinstance(arg, Cache)
    }
    assert found == {E4M3}


def test_untunable_ops_are_refused(context, path):
    all_calls = model_calls(context, path)
    assert {call.spec.name for call in filter_calls(all_calls, ("rope",))} == {"rope"}
    with pytest.raises(RequestError, match="found ropes; tunable ops of this model"):
        filter_calls(all_calls, ("rope", "ropes"))
    call = next(c for c in all_calls if c.spec.name == "rope")
    invalid = (StrictArray((2,), "int32"), *call.args[1:])
    with pytest.raises(RequestError, match=r"op rope: q is int32\[2\]"):
        Inputs([1]).case(call.spec, invalid, call.attrs, length=1)
