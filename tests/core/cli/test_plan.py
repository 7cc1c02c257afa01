"""``inl plan``: placements of a model folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl.checkpoints.checkpoint import open_checkpoint
from inl.cli.main import main
from inl.testing.tiny import tiny_llama
from mtp_layers import mtp_tensors


def run(capsys, *words):
    code = main(["plan", *words])
    return code, *capsys.readouterr()


def planned(capsys, folder, *words):
    code, out, err = run(capsys, str(folder), "--json", *words)
    assert code == 0, err
    return json.loads(out)


def test_the_bytes_are_those_of_the_files_and_the_cache(capsys, tiny_folder):
    checkpoint = open_checkpoint(tiny_folder)
    stored = sum(checkpoint.tensor(name).data.nbytes for name in checkpoint.names())
    config = checkpoint.config
    plan = planned(capsys, tiny_folder, "--devices", "2x1GB", "--context", "10")
    assert plan["weight_bytes"] == stored
    dim = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim
    assert plan["kv_bytes"] == values * 10 * 2
    assert (plan["context"], plan["data_parallel"], plan["fits"]) == (10, 2, True)
    assert plan["kv_bytes_per_token"] == values * 2
    code, out, _ = run(capsys, str(tiny_folder), "--devices", "2x1GB")
    assert code == 0
    assert f"contents of {values * 2:,} bytes a token" in out
    assert f"prompts of {1e9 / (values * 2):,.0f} tokens/s" in out
    _, out, _ = run(capsys, str(tiny_folder), "--devices", "1x1GB")
    assert "--role" not in out
    wide = planned(capsys, tiny_folder, "--devices", "2x1GB", "--dtype", "float64")
    assert wide["weight_bytes"] == 8 * plan["model_size_params"]
    trained = planned(capsys, tiny_folder, "--devices", "1x1", "--training")
    assert trained["optimizer_bytes"] == 8 * plan["model_size_params"]
    assert trained["gradient_bytes"] == 4 * plan["model_size_params"]
    half = planned(
        capsys, tiny_folder, "--devices", "1x1", "--training", "--dtype", "bfloat16"
    )
    assert half["optimizer_bytes"] == 12 * plan["model_size_params"]


def test_too_little_memory_divides_the_model_or_does_not_fit(capsys, tiny_folder):
    whole = planned(capsys, tiny_folder, "--devices", "2x1GB", "--context", "8")
    least = sum(value for name, value in whole.items() if name.endswith("_bytes"))
    least = (least - whole["budget_bytes"]) / 1e9 / 0.9
    split = planned(
        capsys, tiny_folder, "--devices", f"2x{0.9 * least:.9f}", "--context", "8"
    )
    assert split["tensor_parallel"] * split["pipeline_parallel"] == 2
    code, out, _ = run(capsys, str(tiny_folder), "--devices", "2x0.000001GB")
    assert code == 0
    assert "nothing fits" in out.splitlines()[-1]


def test_devices_of_this_machine(capsys, tiny_folder):
    code, out, err = run(capsys, str(tiny_folder), "--devices", "reference")
    assert (code, err) == (0, "")
    assert out.startswith("1 x ")
    assert "weights" in out
    assert "available" in out


def test_host_memory_of_evicted_blocks(capsys, tiny_folder, monkeypatch):
    from inl.kv_tiers import host_size

    here = ("--devices", "reference", "--context", "64")
    assert planned(capsys, tiny_folder, *here)["kv_host_bytes"] == 0  # a tiny cache
    monkeypatch.setattr(host_size, "LEAST_BYTES", 1)
    plan = planned(capsys, tiny_folder, *here)
    assert plan["kv_host_bytes"] == 4 * plan["kv_bytes"]
    text = run(capsys, str(tiny_folder), *here)[1]
    assert "blocks that the cache has no room for take up to 0.0" in text
    monkeypatch.setattr(host_size, "free_bytes", lambda: 8 * plan["kv_bytes"])
    plan = planned(capsys, tiny_folder, *here)
    assert plan["kv_host_bytes"] == plan["kv_bytes"]
    there = planned(capsys, tiny_folder, "--devices", "1x1GB", "--context", "64")
    assert there["kv_host_bytes"] == 0


def test_any_number_of_devices(capsys, tiny_folder):
    code, out, _ = run(capsys, str(tiny_folder), "--devices", "99999999x1GB")
    assert code == 0
    assert "99999999 copies" in out
    assert len(out) < 2000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "0x80GB"), "devices: found '0x80GB'"),
        (("--devices", "reference,reference"), "devices: found"),
        (("--devices", ""), "devices: found ''"),
        (("--devices", "nobody:0"), "nobody"),
        (("--devices", "1x1", "--dtype", "float3"), "dtype: found 'float3'"),
        (("--devices", "1x1", "--kv-dtype", "auto"), "kv-dtype: found 'auto'"),
    ],
)
def test_refusals(capsys, tiny_folder, words, message):
    code, out, err = run(capsys, str(tiny_folder), *words)
    assert code != 0
    assert out == ""
    assert message in err


def test_a_layer_that_predicts_further_tokens_is_counted(capsys, tmp_path):
    rng = np.random.default_rng(3)
    target = tiny_llama(rng, vocab=96, kv_heads=2, layers=2)
    layer = mtp_tensors(rng, target)
    (tmp_path / "config.json").write_text(json.dumps(target[0]))
    save_file(target[1], tmp_path / "model.safetensors")
    without = planned(capsys, tmp_path, "--devices", "1x1GB", "--context", "10")
    save_file(target[1] | layer, tmp_path / "model.safetensors")
    plan = planned(capsys, tmp_path, "--devices", "1x1GB", "--context", "10")
    stored = sum(x.nbytes for x in layer.values())
    assert without["draft_bytes"] == 0
    assert plan["draft_bytes"] == stored + without["kv_bytes"] // 2
    assert plan["weight_bytes"] == without["weight_bytes"]
    _, out, _ = run(capsys, str(tmp_path), "--devices", "1x1GB")
    assert "layer of further tokens" in out
    assert "none with --speculation none" in out
    two = planned(capsys, tmp_path, "--devices", "2x0.0001GB", "--context", "10")
    assert (two["tensor_parallel"], two["draft_bytes"]) == (2, 0)
