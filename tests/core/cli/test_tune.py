"""``inl tune`` on a toy backend with correct, wrong and crashing kernel configs."""

from __future__ import annotations

import json

import pytest

BACKEND = """
import os
import time
from functools import partial
from types import SimpleNamespace

import numpy as np

from inl.backend import tunable
from inl.backend.reference import body_kernel
from inl.backend.tunable import Facts, Tunable
from inl.device import DeviceInfo
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import hookimpl, simple_backend
from inl.spec.kernel import Kernel

VARIANTS = {VARIANTS}
VERSION = {VERSION!r}
BROKEN = []
NOW = [0.0]
# The measured durations must not depend on the machine: a clock that kernels advance.
tunable.time = SimpleNamespace(perf_counter=lambda: NOW[0])
VARIANTS_BY_NUMBER = ("slow", "fair", "good", "wrong", "raise", "exit", "hang", "break")


def tensor(host):
    if BROKEN:
        raise OSError("the device is gone")
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def linear(x, w, *, variant):
    NOW[0] += dict(slow=4e-3, fair=1e-3).get(variant, 2e-5)
    if variant == "raise":
        raise ArithmeticError("tile is too wide")
    if variant == "break":
        BROKEN.append(True)
        raise OSError("an access that was illegal")
    if variant == "exit":
        os._exit(7)
    if variant == "hang":
        time.sleep(1000)
    y = np.zeros_like(x, shape=(len(x), len(w.weight)))
    if variant != "wrong":
        y = x @ w.weight.T
    return y if w.bias is None else y + w.bias


def variant_of(config):
    return VARIANTS_BY_NUMBER[config["variant"]]


def make_kernel(config):
    def run(x, w):
        return linear(x, w, variant=variant_of(config))

    return Kernel("linear", "toy", run, preference=1, config=config)


class ToyTunable(Tunable):
    cache_bytes = 0

    def facts(self):
        return Facts("toy chip", "driver 1", "none", VERSION)

    def search_space(self, op, *specs, **attrs):
        if op != "linear" or specs[1].weight.shape[0] != 258:
            return ()  # the head's alone
        return [[{{"variant": variant}} for variant in VARIANTS]]

    def kernel(self, op, config):
        return make_kernel(config)


def kernels():
    yield Kernel("linear", "toy", partial(linear, variant="slow"), preference=1)
    for op in catalog().values():
        if not op.composite and op.name != "linear":
            yield Kernel(op.name, "body", body_kernel(op, "float32"))


Backend = simple_backend(
    tensor=tensor, numpy=wrap, kernels=kernels, capabilities=[ToyTunable()]
)


@hookimpl
def inl_register_backends(register):
    register("npu", "fake_npu:Backend", probe=lambda: [DeviceInfo(0, "toy chip")])
"""
FAIR, GOOD, WRONG, RAISE, EXIT, HANG, BREAK = range(1, 8)


@pytest.fixture
def tune(inl, plugin, tiny_folder, tmp_path):
    """Run ``inl tune`` on the toy with these configs and a separate tuning file."""

    def run(*words, variants=(FAIR, GOOD), version="toy 1", command="tune", limit=120):
        env = plugin(BACKEND.format(VARIANTS=list(variants), VERSION=version))
        env["INL_CACHE"] = str(tmp_path / "cache")
        # Modules of the same size and second would share a compiled file.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        if command == "tune":
            words = ("--limit", str(limit), *words)
        words = (command, "--device", "npu", "--model", str(tiny_folder), *words)
        return inl(*words, env=env)

    return run


def found(done):
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert record["format"] == "inl-tuning/1"
    return record["measured"], record["quarantined"]


def small(tune, *words, **options):
    return found(tune("--rows", "1", "--json", *words, **options))


def winner(tune, **options):
    """Return the kernel that an engine selects for the output head, and stderr."""
    done = tune("--json", command="explain", **options)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["ops"]
    return [row for row in rows if row["op"] == "linear"][-1], done.stderr


@pytest.mark.full
def test_the_fastest_correct_config_is_stored_and_selected(tune):
    assert winner(tune)[0]["winner"] == "linear/toy"
    measured, quarantined = small(tune)
    assert measured
    assert quarantined == []
    for entry in measured:
        assert entry["op"] == "linear"
        assert entry["config"] == {"variant": GOOD}
        assert entry["seconds"] < 0.5 * entry["before"]
        assert entry["plugin"] == "toy 1"
    row, _ = winner(tune)
    assert row["winner"] == "linear/toy (tuned: variant=2)"
    assert row["refusals"] == {"linear/toy": "is slower here, as inl tune measured"}


@pytest.mark.full
def test_a_fast_but_wrong_config_is_quarantined(tune):
    measured, quarantined = small(tune, variants=(FAIR, WRONG))
    assert {entry["config"]["variant"] for entry in measured} == {FAIR}
    assert {entry["config"]["variant"] for entry in quarantined} == {WRONG}
    for entry in quarantined:
        assert entry["reason"].startswith("wrong: error ")
        assert "seed" in entry["reason"]
    # A quarantined config is not measured again.
    again, still = small(tune, variants=(WRONG,))
    assert {len(entry["config"]) for entry in again} == {0}
    assert still == quarantined


@pytest.mark.full
def test_a_config_that_ends_its_process_is_quarantined(tune):
    measured, quarantined = small(
        tune, "--ops", "linear", variants=(RAISE, BREAK, EXIT, GOOD)
    )
    assert {entry["config"]["variant"] for entry in measured} == {GOOD}
    reasons = {entry["config"]["variant"]: entry["reason"] for entry in quarantined}
    assert reasons == {
        RAISE: "ArithmeticError: tile is too wide",
        BREAK: "OSError: an access that was illegal",
        EXIT: "its process ended with exit status 7",
    }
    shown = tune("--show").stdout
    assert "quarantined: its process ended with exit status 7" in shown
    assert "variant=5" in shown


@pytest.mark.full
def test_a_config_that_hangs_is_quarantined(tune):
    measured, quarantined = small(tune, variants=(HANG, GOOD), limit=6)
    assert {entry["config"]["variant"] for entry in measured} == {GOOD}
    assert {e["reason"] for e in quarantined} == {
        "its process did not reply within 6 s"
    }


@pytest.mark.full
def test_a_quarantined_default_kernel_is_not_selected(tune, tmp_path):
    """The default kernel itself may be quarantined, with an empty config."""
    small(tune)
    path = tmp_path / "cache" / "tuning.json"
    record = json.loads(path.read_text())
    (first, *_) = record["measured"]
    bad = {key: first[key] for key in first if key not in ("seconds", "before")}
    reason = {"kernel": "linear/toy", "config": {}, "reason": "wrong: planted"}
    record["quarantined"] = [{**bad, **reason}]
    record["measured"] = []
    path.write_text(json.dumps(record))
    done = tune(command="explain")
    assert "missing" in done.stdout
    said = f"not linear/toy: quarantined by inl tune on {first['when']}: wrong: planted"
    assert said in done.stdout


@pytest.mark.full
def test_results_of_another_version_are_ignored(tune):
    small(tune)
    assert winner(tune, version="toy 2")[0]["winner"] == "linear/toy"


@pytest.mark.full
def test_export_import_and_clear(tune, tmp_path):
    measured, _ = small(tune)
    there = tmp_path / "there.json"
    assert tune("--export", str(there)).returncode == 0
    assert json.loads(there.read_text())["measured"] == measured
    assert tune("--clear").returncode == 0
    assert found(tune("--show", "--json")) == ([], [])
    assert "no results in " in tune("--show").stdout
    assert found(tune("--import", str(there), "--json")) == (measured, [])
    assert found(tune("--clear", "--ops", "rope", "--json")) == (measured, [])
    assert found(tune("--clear", "--ops", "linear", "--json")) == ([], [])


@pytest.mark.full
def test_configs_skipped_for_lack_of_time_are_reported(tune):
    done = tune("--rows", "1", "--seconds", "0")
    assert done.returncode == 0
    assert done.stderr == "inl: tried 1 of 3 configurations in 0 s; raise --seconds\n"


@pytest.mark.full
@pytest.mark.parametrize("text", ["{", '{"format": "other"}'])
def test_a_damaged_tuning_file_is_reported_and_ignored(tune, tmp_path, text):
    path = tmp_path / "cache" / "tuning.json"
    path.parent.mkdir()
    path.write_text(text)
    row, said = winner(tune)
    assert row["winner"] == "linear/toy"
    (line,) = said.splitlines()
    assert str(path) in line
    assert "ignored" in line
    done = tune()
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert path.read_text() == text
    assert tune("--clear").returncode == 0
    assert not path.exists()


@pytest.mark.full
def test_invalid_options(tune, tmp_path, inl):
    for words, said in (
        (("--rows", "0"), "rows: found '0'"),
        (("--ops", "rope"), "ops: found rope; tunable ops of this model"),
        (("--import", str(tmp_path / "no")), "no such file"),
    ):
        done = tune(*words)
        assert done.returncode == 2
        assert said in done.stderr
    done = inl("tune", "--device", "reference", "--model", "smollm2")
    assert done.returncode == 2
    assert (
        "reference:0: nothing to tune: the backend has no tunable kernels, it chooses "
        "their sizes itself; docs/cli.md says by what"
    ) in done.stderr
