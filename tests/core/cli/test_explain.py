"""``inl explain --cost``: the roofline of a step."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eagle_heads import random_head, written
from inl.backend.provisional import WholeModels
from inl.backend.reference import ReferenceBackend
from inl.cli.main import main
from inl.executor.model_loader import open_model
from inl.weights.load import stored_specs
from lora_files import LoraFiles


def run(capsys, folder, *words):
    base = ["explain", "--model", str(folder), "--device", "reference"]
    code = main([*base, *words])
    return code, *capsys.readouterr()


def costs(capsys, folder, *words):
    code, out, err = run(capsys, folder, "--cost", "--json", *words)
    assert code == 0, err
    report = json.loads(out)["cost"]
    return report, {row["op"]: row for row in report["rows"]}


def test_rows_add_up_to_the_total(capsys, tiny_folder):
    given = ("--bandwidth", "2", "--context", "64")
    report, rows = costs(capsys, tiny_folder, *given)
    assert report["context"] == 64
    assert report["bandwidth"] == {"bytes_per_second": 2e9, "how": "as given"}
    for key in ("flops", "bytes", "seconds"):
        total = sum(row[key] for row in rows.values())
        assert total == pytest.approx(report["total"][key])
    assert report["total"]["seconds"] == pytest.approx(report["total"]["bytes"] / 2e9)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows["linear"]["intensity"] == pytest.approx(
        rows["linear"]["flops"] / rows["linear"]["bytes"]
    )


def test_composed_ops_and_ops_between_steps_are_left_out(capsys, tiny_folder):
    _, rows = costs(capsys, tiny_folder, "--bandwidth", "1")
    assert not {"attend", "qkv_linear", "admit", "mask_logits"} & rows.keys()
    assert {"linear", "attention", "sample", "make_step"} <= rows.keys()


def test_a_compute_peak_bounds_the_time_of_ops_with_many_flops(capsys, tiny_folder):
    given = ("--bandwidth", "1", "--tokens", "64")
    _, slow = costs(capsys, tiny_folder, *given, "--peak", "0.000001")
    _, fast = costs(capsys, tiny_folder, *given)
    assert slow["linear"]["seconds"] == pytest.approx(slow["linear"]["flops"] / 1e6)
    assert fast["linear"]["seconds"] == pytest.approx(fast["linear"]["bytes"] / 1e9)
    assert slow["sample"] | {"share": 0} == fast["sample"] | {"share": 0}


def test_a_longer_context_moves_more_cache(capsys, tiny_folder):
    moved = [
        costs(capsys, tiny_folder, "--bandwidth", "1", "--context", each)[1]
        for each in ("64", "128")
    ]
    extra = moved[1]["attention"]["bytes"] - moved[0]["attention"]["bytes"]
    hf = json.loads((tiny_folder / "config.json").read_text())
    lanes = hf["num_key_value_heads"] * hf["head_dim"]
    assert extra == hf["num_hidden_layers"] * 64 * 2 * lanes * 4
    assert moved[0]["linear"] | {"share": 0} == moved[1]["linear"] | {"share": 0}


def test_the_table_has_heads_a_total_and_its_assumptions(capsys, tiny_folder):
    given = ("--cost", "--bandwidth", "1", "--context", "64")
    code, out, _ = run(capsys, tiny_folder, *given)
    assert code == 0
    first, *lines = out.splitlines()
    assert first.endswith("a step of 1 token in 1 row (greedy)")
    assert lines[0].split() == [
        "op", "calls", "MFLOP", "MB", "FLOP/byte", "us", "share", "kernel"
    ]  # fmt: skip
    total = next(line for line in lines if line.startswith("total"))
    assert total.split()[-1] == "100.0%"
    assert "longest context, 64 tokens" in out
    assert "compute peak not known" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sampler", "draw"], "sampler: found 'draw', accepted: greedy, sample"),
        (["--bandwidth", "0"], "bandwidth: found 0.0, accepted: a number above 0"),
        (["--peak", "-1"], "peak: found -1.0, accepted: a number above 0"),
    ],
)
def test_bad_options(capsys, tiny_folder, words, says):
    code, _, err = run(capsys, tiny_folder, "--cost", *words)
    assert code == 2
    assert says in err


def test_layers_that_a_backend_computes_at_once(capsys, tiny_folder, monkeypatch):
    def describe(model, config, plans, bucket, limits):
        assert len(plans.layers) == config.layers
        return f"one kernel of {bucket.tokens} x {limits.block_size}"

    def offers(self, kind):
        whole = WholeModels(lambda model: model, describe=describe)
        return whole if kind is WholeModels else offered(self, kind)

    assert "layers: " not in run(capsys, tiny_folder)[1]
    offered = ReferenceBackend.offers
    monkeypatch.setattr(ReferenceBackend, "offers", offers)
    assert "\nlayers: one kernel of 1 x 16\n" in run(capsys, tiny_folder)[1]
    report = json.loads(run(capsys, tiny_folder, "--json")[1])
    assert report["layers"] == "one kernel of 1 x 16"


def test_the_options_of_an_engine(capsys, tiny_folder, tmp_path):
    """Adapters, a draft head, the invariant mode, hosted ops and ranks."""
    hf = json.loads((tiny_folder / "config.json").read_text())
    stored = stored_specs(open_model(tiny_folder).checkpoint)
    tensors = {name: np.zeros(spec.shape) for name, spec in stored.items()}
    lora = LoraFiles(tensors, seed=1).write(tmp_path / "lora")
    taps = list(range(min(hf["num_hidden_layers"], 2)))
    head = random_head(np.random.default_rng(8), hf, taps=taps)
    folder = written(tmp_path / "head", *head)

    def report(*words):
        code, out, err = run(capsys, tiny_folder, "--json", *words)
        assert code == 0, err
        return json.loads(out)

    def ops(table):
        return {row["op"]: row["how"] for row in table}

    plain = ops(report()["ops"])
    assert "lora" in ops(report("--adapter", f"one={lora}")["ops"]).keys() - plain
    drafted = report("--speculation", "eagle", "--draft-model", str(folder))
    assert "join_lanes" in ops(drafted["ops"]).keys() - plain
    assert "take_rows" in ops(drafted["draft_head"])
    shown = run(
        capsys, tiny_folder, "--speculation", "eagle", "--draft-model", str(folder)
    )
    assert "\ndraft head:\n" in shown[1]
    assert plain["linear"] == "native"
    assert ops(report("--invariant")["ops"])["linear"] == "missing"
    hosted = report("--invariant", "--allow-hosted")["ops"]
    assert ops(hosted)["linear"] == "hosted"
    for words in ("--tensor-parallel", "2"), ("--placement", "tensor=2"):
        divided = ops(report(*words)["ops"])
        assert divided["all_reduce"] == "native"
    code, _, err = run(capsys, tiny_folder, "--placement", "data=2,pipeline=2")
    assert code == 2
    assert "found data=2 with pipeline=2; accepted: one of them" in err
    code, _, err = run(capsys, tiny_folder, "--placement", "expert=2")
    assert code == 2
    assert "the model has no weights of the ops experts and expert_linear" in err
