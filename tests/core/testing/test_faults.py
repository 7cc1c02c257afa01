"""``inl check`` detects each planted fault and passes a correct backend."""

from __future__ import annotations

import json

import pytest

from depth import mostly_full, scaled
from inl.ops import catalog


def card_of(done):
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_correct_backend_passes_and_prints_its_card(check):
    done = check("faulty:0", "--json")
    card = card_of(done)
    assert (done.returncode, card["passed"], card["failures"]) == (0, True, [])
    assert card["device"] == "faulty:0"
    assert card["dtypes"] == ["float32"]
    assert {"inl", "python", "plugin", "numpy"} <= card["versions"].keys()
    assert set(card["sections"]) == {
        "backend", "kernel", "runner", "blocks", "engine", "feature", "ranks",
    }  # fmt: skip
    for counts in card["sections"].values():
        assert counts["passed"] > 0
        assert counts["failed"] == 0
    assert card["ops"]["linear"]["how"] == ["native"]
    assert card["ops"]["gated_mlp"]["how"] == ["composed"]
    assert 0 < card["ops"]["linear"]["worst_ratio"] <= 1
    assert card["invariant"] == []
    assert "linear" in card["invariant_missing"]
    assert card["seconds"] > 0


FAULTS = {
    "scale": {"attention/", "attend/", "runner/logits/"},
    "rope": {"rope_table/"},
    "write": {"write_kv/", "attend/", "runner/chunks/", "engine/batched/"},
    "uniform": {"sample/sample/", "runner/uniforms/", "engine/seeds/"},
    "bias": {"linear/"},
    "leak": {"engine/batched/", "engine/cancel/"},
}
"""Fault -> name prefixes; each must match a failed check."""


@pytest.mark.parametrize("fault", mostly_full(sorted(FAULTS), 0))
def test_each_planted_fault_is_found(check, fault):
    only = ["--only", "backend"]
    only += [word for name in FAULTS[fault] for word in ("--only", name.rstrip("/"))]
    done = check("faulty:0", "--json", *only, fault=fault)
    card = card_of(done)
    assert (done.returncode, card["passed"]) == (1, False)
    failed = [failure["check"] for failure in card["failures"]]
    for beginning in FAULTS[fault]:
        assert any(name.startswith(beginning) for name in failed), failed
    assert card["sections"]["backend"]["failed"] == 0


@pytest.mark.full
def test_a_kernel_that_admits_only_the_first_request_fails(check):
    # Failed steps are logged, and the engine goes on.
    only = ("--only", "admit", "--only", "backend")
    card = json.loads(check("faulty:0", "--json", *only, fault="alone").stdout)
    failed = {failure["check"] for failure in card["failures"]}
    assert any(name.startswith("admit/") for name in failed)
    assert "backend/compile" in failed


@pytest.mark.full
def test_a_block_leak_is_reported_as_one(check):
    only = ("--only", "engine/batched")
    card = card_of(check("faulty:0", "--json", *only, fault="leak"))
    (found,) = {
        failure["message"].partition(":")[0]
        for failure in card["failures"]
        if failure["check"].startswith("engine/batched/")
    }
    assert found == "block leak"


@pytest.mark.full
def test_the_table_names_the_worst_case_and_what_to_do(check):
    done = check("faulty:0", "--seed", "11", fault="bias")
    assert done.returncode == 1
    assert "failed  linear/" in done.stdout
    assert "linear/numpy on faulty:0: error " in done.stdout
    assert "compare with the body of linear, or list a gap" in done.stdout
    assert "to repeat: inl check faulty:0 --seed 11" in done.stdout


@pytest.mark.full
def test_the_seed_determines_all_inputs(check):
    names = [*catalog()][:: scaled(4, 4, 1)]
    ops = [word for name in names for word in ("--op", name)]
    first, again, other = (
        {name: op["worst_ratio"] for name, op in card_of(done)["ops"].items()}
        for done in (
            check("faulty", "--json", "--seed", seed, *ops) for seed in ("5", "5", "6")
        )
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "words", mostly_full([("nobody:0",), ("faulty:7",), ("Faulty",)])
)
def test_an_unavailable_device_is_a_usage_error(check, words):
    done = check(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("inl: ")
    assert "Traceback" not in done.stderr


def test_one_op_is_checked_and_the_kernel_at_fault_is_listed_once(check):
    done = check("faulty:0", "--op", "linear", "--op", "qkv_linear", fault="bias")
    assert done.returncode == 1
    assert done.stdout.count("\nfailed  ") == 1
    assert "linear/numpy on faulty:0: error " in done.stdout
    assert "more checks (linear/" in done.stdout
    assert "also fails 19 checks (qkv_linear/" in done.stdout
    assert done.stdout.rstrip().endswith("--op linear --op qkv_linear")
    assert "runner" not in done.stdout


def test_an_unknown_op_is_a_usage_error(check):
    done = check("faulty:0", "--op", "liner")
    assert done.returncode == 2
    assert "there is no op 'liner'; did you mean 'linear'? known: " in done.stderr


@pytest.mark.full
def test_only_the_named_checks_run(check):
    done = check("faulty:0", "--only", "backend", "--only", "linear/2x5x3")
    assert done.returncode == 0
    assert "passes all 14 checks" in done.stdout
    done = check("faulty:0", "--only", "linaer")
    assert done.returncode == 2
    assert "no check is named 'linaer'; accepted: a section of " in done.stderr
    assert "; a check's name, or its first parts, of " in done.stderr


@pytest.mark.full
def test_known_failures_are_read_from_a_file(check, tmp_path):
    gaps = tmp_path / "gaps.toml"
    name = "linear/1x8x16"
    words = "faulty:0", "--op", "linear", "--only", name, "--gaps", str(gaps)
    gaps.write_text(f'[gaps]\n"{name}" = "sums are rounded"\n')
    done = check(*words, fault="bias")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "known gaps" in done.stdout
    done = check(*words)
    assert done.returncode == 1
    assert f"the gap {name!r} has expired" in done.stdout
    for text, part in (
        ('[gaps]\nliner = "x"\n', "gap 'liner': covers no check"),
        ("gaps = 3\n", "found no table [gaps]"),
        ("[gaps", "gaps.toml: Expected"),
    ):
        gaps.write_text(text)
        done = check(*words)
        assert done.returncode == 2
        assert part in done.stderr
