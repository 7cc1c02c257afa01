"""The file of measurements: merging, many writers, and what is not such a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inl.backend.tunable import Facts
from inl.errors import RequestError
from inl.executor.tuning_file import read, update, write
from inl.executor.tuning_record import (
    Quarantined,
    TuningMeasurement,
    dump,
    parse,
    record,
)
from inl.spec.workload import Workload
from outcomes import Outcomes

FACTS = Facts("chip", "1", "compiler 2", "inl-toy 3")


def measured(shape, way=1, when="2026-11-01", facts=FACTS):
    work = Workload("linear", "float32", shape)
    return TuningMeasurement(work, facts, {"way": way}, 1e-6, 2e-6, when)


def barred(shape, way=1):
    work = Workload("linear", "float32", shape)
    config = {"way": way}
    return Quarantined(work, FACTS, "linear/toy", config, "wrong", "2026-11-01")


def test_there_and_back(tmp_path):
    found = record(measured("a"), measured("b", way=-3), barred("a", 7))
    write(tmp_path / "file", found)
    assert read(tmp_path / "file") == found
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_newer_measurement_stays():
    old = record(measured("a", 1, "2026-11-01"))
    new = record(measured("a", 2, "2026-11-02"))
    for merged in (old.merged(new), new.merged(old)):
        assert [entry.config for entry in merged.measured.values()] == [{"way": 2}]


def test_other_facts_are_another_measurement():
    other = record(measured("a", facts=FACTS._replace(driver="2")))
    assert len(record(measured("a")).merged(other).measured) == 2


def test_what_either_has_in_quarantine_wins_nowhere():
    good, bad = record(measured("a"), measured("b")), record(barred("a"))
    for merged in (good.merged(bad), bad.merged(good)):
        assert [entry.work.shape for entry in merged.measured.values()] == ["b"]
        assert len(merged.quarantined) == 1


WRITER = """
import sys
from pathlib import Path
from tests_record import measured, record, update
for number in range(10):
    entry = measured(f"{sys.argv[2]} {number}")
    update(Path(sys.argv[1]), lambda known: known.merged(record(entry)))
"""


def test_no_writer_undoes_another(tmp_path, monkeypatch):
    module = tmp_path / "tests_record.py"
    module.write_text(Path(__file__).read_text())
    with_support = os.pathsep.join(filter(None, sys.path))
    monkeypatch.setenv("PYTHONPATH", with_support)
    path = tmp_path / "tuning.json"
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(n)], cwd=tmp_path)
        for n in range(4)
    ]
    assert [each.wait(300) for each in running] == [0] * 4
    assert len(read(path).measured) == 40


def test_a_damaged_file_is_not_overwritten(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        update(path, lambda known: known)
    assert path.read_text() == "{"


def test_an_unreadable_place_is_said(tmp_path):
    with pytest.raises(RequestError, match="directory"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"file.x: "):
        write(tmp_path / "file" / "x", record())


GOOD = json.loads(dump(record(measured("a"), barred("b"))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.pop("measured"), "measured: found None, accepted: a list"),
        (lambda f: f["measured"].append(3), r"measured\[1\]: found 3"),
        (lambda f: f["measured"][0].update(op=3), r"measured\[0\]: op: found 3"),
        (lambda f: f["measured"][0].update(seconds="x"), "seconds: found 'x'"),
        (lambda f: f["measured"][0]["config"].update(way=1.5), "way: found 1.5"),
        (lambda f: f["quarantined"][0].pop("reason"), "reason: found None"),
        (lambda f: f.update(format="inl-tuning/2"), "not a 'inl-tuning/1' file"),
    ],
)
def test_each_field_is_checked(change, said):
    found = json.loads(json.dumps(GOOD))
    change(found)
    with pytest.raises(RequestError, match=said):
        parse(json.dumps(found), "file")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def test_any_value_of_a_field_is_read_or_refused(depth):
    outcomes = Outcomes()

    @settings(max_examples=depth(50, 200))
    @given(JSON, st.sampled_from(sorted(GOOD["measured"][0])))
    @example(0.5, "seconds")
    @example(None, "seconds")
    def check(value, name):
        record = json.loads(json.dumps(GOOD))
        record["measured"][0][name] = value
        with outcomes.refused_by(RequestError):
            parse(json.dumps(record), "file")

    check()
    outcomes.check()
