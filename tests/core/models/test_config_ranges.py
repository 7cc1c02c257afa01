"""Numbers of a config: ranges, and counts that the files do not bear out."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from depth import mostly_full
from inl.checkpoints.counts import check_counts
from inl.errors import CheckpointError
from inl.executor.model_loader import open_model
from inl.models import deep_config, gemma3, llama
from inl.testing.tiny import tiny_llama
from limited import run_limited

HF = tiny_llama(np.random.default_rng(0), vocab=64)[0]
INFINITE = [float("inf"), float("-inf"), float("nan"), 1e400, 10**400]
WRONG = [*INFINITE, -1e-5, 0, 0.0, True, "1", [1e-5], 1e-60]


def shown(value):
    return repr(value)[:8]


@pytest.mark.parametrize("value", [*WRONG, 2.0], ids=shown)
@pytest.mark.parametrize("read", [llama.config, deep_config.common])
def test_an_epsilon_out_of_range_is_refused(value, read):
    with pytest.raises(CheckpointError, match=r"'rms_norm_eps': found .*1e-30 to 1"):
        read(HF | {"rms_norm_eps": value})
    assert read(HF | {"rms_norm_eps": 1e-5})


@pytest.mark.parametrize("value", WRONG, ids=shown)
@pytest.mark.parametrize("field", ["rope_theta", "factor"])
def test_numbers_of_the_rotation_out_of_range_are_refused(value, field):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, field: value}
    with pytest.raises(CheckpointError, match=rf"'{field}': found .*1e-30 to 1e\+30"):
        llama.config(HF | {"rope_scaling": rope})


@pytest.mark.parametrize("value", [1, 0, -1, 2**31, 10**400, 1.5], ids=shown)
@pytest.mark.parametrize("read", [llama.config, deep_config.common])
def test_a_context_without_room_for_an_answer_is_refused(value, read):
    with pytest.raises(CheckpointError, match=r"'max_position_embeddings': found"):
        read(HF | {"max_position_embeddings": value})
    assert read(HF | {"max_position_embeddings": 2})


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama with other fields in its config."""

    def write(**fields):
        hf, tensors = tiny_llama(np.random.default_rng(0), vocab=64)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(hf | fields))
        return tmp_path

    return write


OPEN = """
from inl.executor.model_loader import open_model
def work():
    open_model(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measured with /proc")
@pytest.mark.parametrize("layers", mostly_full([10**9, 2_000_000, 4097]))
def test_layers_beyond_the_tensors_are_not_planned(folder, layers):
    path = folder(num_hidden_layers=layers)
    found = run_limited(OPEN, path)
    assert found.result == "refused", found
    assert f"'num_hidden_layers': found {layers}, but the files have" in found.message
    assert found.memory < 64 << 20
    assert found.seconds < 5


def test_one_layer_too_many_is_reported_as_missing_tensors(folder):
    with pytest.raises(Exception, match=r"missing model\.layers"):
        open_model(folder(num_hidden_layers=3))


@pytest.mark.skipif(sys.platform != "linux", reason="measured with /proc")
def test_experts_beyond_all_bounds_are_not_planned(folder):
    path = folder(
        architectures=["MixtralForCausalLM"], model_type="mixtral",
        num_local_experts=10**9, num_experts_per_tok=2,
    )  # fmt: skip
    found = run_limited(OPEN, path)
    assert found.result == "refused", found
    assert "'num_local_experts': found 1000000000 in each of" in found.message
    assert found.memory < 64 << 20


@pytest.mark.parametrize("name", ["n_layer", "n_routed_experts", "moe_num_experts"])
def test_other_names_of_counts_are_bounded(name):
    with pytest.raises(CheckpointError, match=f"'{name}': found 1000000000"):
        check_counts({"num_hidden_layers": 2, name: 10**9}, 20, "files")


@pytest.mark.parametrize("value", [1, "x", [1], True], ids=shown)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rope_fields_that_are_no_objects_are_refused(name, value):
    fields = {name: value, "head_dim": 16, "sliding_window": 8}
    with pytest.raises(CheckpointError, match=r"found .*, expected an object"):
        gemma3.config(HF | fields)
    with pytest.raises(CheckpointError, match="'full_attention': found 5, expected"):
        gemma3.config(HF | {"rope_parameters": {"full_attention": 5}})


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="measured with /proc")
def test_experts_that_the_files_do_not_have_take_little_memory(folder):
    path = folder(
        architectures=["MixtralForCausalLM"], model_type="mixtral",
        num_local_experts=2**14, num_experts_per_tok=2,
    )  # fmt: skip
    found = run_limited(OPEN, path)
    assert found.result == "refused", found
    assert "more" in found.message
    assert found.memory < 64 << 20
