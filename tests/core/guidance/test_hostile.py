"""Grammars of hostile clients: refused or compiled within limits, and nothing is lost.

A grammar follows from its number: ``hostile_worker.py 7 8`` tries one again.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from depth import scaled
from forking import run_script
from fuzz_reports import reports
from inl.bounded_child import BoundedChild
from inl.errors import RequestError
from plain_byte_tokens import plain_bytes_as_tokens

pytest.importorskip("llguidance")
from inl.guidance import trials
from inl.guidance.grammars import Grammars

WORKER = Path(__file__).with_name("hostile_worker.py")
SECONDS = 20.0
"""Processor time of the engine's process for a grammar; the child's limit is one."""
MEMORY = 512 << 20
"""Bytes that all compiled grammars may take together."""


def is_bad(each):
    """Whether a grammar ended the process, took too long or got an unclear answer."""
    if each["result"] == "refused" and not each["message"].startswith("structured"):
        return True
    return each["result"] not in ("compiled", "refused") or each["seconds"] > SECONDS


@pytest.mark.scaled
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_hostile_grammars_end_no_process_and_keep_little(tmp_path, report):
    count = scaled(200, 300, 10_000)
    found = list(reports(WORKER, [], tmp_path, 0, count))
    bad = [each for each in found if is_bad(each)]
    assert not bad, bad[:3]
    memory = [each["memory"] for each in found]
    results = Counter(each["result"] for each in found)
    exceeded = sum("its compilation failed" in each["message"] for each in found)
    slowest = max(each["step"] for each in found)
    report(
        f"{count} grammars: {dict(results)}, {exceeded} of them ended the child; at "
        f"most {max(each['seconds'] for each in found):.2f} s and {slowest:.3f} s a "
        f"step here, {(max(memory) - memory[0]) >> 20} MiB more"
    )
    assert results["compiled"] > count // 5
    assert results["refused"] > count // 5
    assert max(memory) - memory[0] < MEMORY


@pytest.fixture(scope="module")
def grammars():
    tokenizer = plain_bytes_as_tokens()
    made = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 1 << 20)
    yield made
    made.close()


def chain(count):
    """Definitions of which each requires the next one."""
    names = {
        f"d{at}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}},
            "required": ["a"],
        }
        for at in range(count)
    }
    names[f"d{count}"] = {"type": "integer"}
    return {"json_schema": {"$defs": names, "$ref": "#/$defs/d0"}}


def rules(count, form="r{}"):
    lines = [f"r{at}: {form.format(at + 1)}" for at in range(count)]
    return {"lark": "\n".join(["start: r0", *lines, f'r{count}: "a"'])}


def wide(count):
    names = {f"p{at}": {"type": "string"} for at in range(count)}
    return {"json_schema": {"type": "object", "properties": names}}


REFUSED = {
    "a chain of references": (chain(1_000), "found 1001 definitions, accepts 1000"),
    "a chain of rules": (rules(5_000), "the library crashed, as it does without room"),
    "many properties": (wide(5_000), "found 5000 properties, accepts 3000"),
    "many values": (
        {"json_schema": {"enum": list(range(20_000))}},
        "found 20000 values of enumerations, accepts 10000",
    ),
    "many choices": (
        {"choice": [str(at) for at in range(20_000)]},
        "found 20000 strings, accepts 10000",
    ),
    "deep schemas": (
        {"json_schema": '{"items":' * 120 + "{}" + "}" * 120},
        "found schemas nested over 100 levels deep",
    ),
    "separators that end nowhere": (
        {
            "json_schema": {
                "type": "array", "items": {"const": 1}, "minItems": 2,
                "x-guidance": {"item_separator": "1+"},
            }
        },
        "x-guidance.item_separator '1+', accepts a comma or a colon",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_limit(grammars, name):
    structured, sentence = REFUSED[name]
    with pytest.raises(RequestError, match=f"structured.*{re.escape(sentence)}"):
        grammars.guide(structured)
    assert grammars.guide({"choice": ["yes"]}).forced


@pytest.mark.skipif(sys.platform == "win32", reason="processor time is not limited")
def test_time_is_limited(monkeypatch):
    program = """
import time
import inl.guidance.trial_process as process
process.CPU_SECONDS = 0.1
process.compile_matcher = lambda *_: any(iter(int, 1))
process.main()
"""
    monkeypatch.setattr(trials, "PROGRAM", program)
    tokenizer = plain_bytes_as_tokens()
    slow = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 999)
    with pytest.raises(RequestError, match="took too much processor time; accepted: a"):
        slow.guide({"regex": "a"})
    slow.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_memory_is_limited(monkeypatch):
    program = """
import inl.guidance.trial_process as process
process.compile_matcher = lambda *_: bytearray(1 << 30)
process.main()
"""
    monkeypatch.setattr(trials, "PROGRAM", program)
    tokenizer = plain_bytes_as_tokens()
    large = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 999)
    with pytest.raises(RequestError, match="MemoryError"):
        large.guide({"regex": "a"})
    large.close()


@pytest.mark.parametrize(
    "lark", ['start: ("x" | "y") /a+/ "a"', 'start: s\ns: /a*/ s | "a"']
)
def test_a_terminal_that_takes_all_text_forces_nothing(grammars, lark):
    guide = grammars.guide({"lark": lark})
    for _ in range(3):
        mask = guide.masks()[0]
        guide.advance(next(at for at in range(256) if mask[at // 32] >> at % 32 & 1))
    assert not guide.forced
    assert not guide.is_complete


def test_ordinary_chains_and_objects_compile(grammars):
    assert grammars.guide(chain(200)).forced
    assert not grammars.guide(rules(200)).is_complete
    assert grammars.guide(wide(400)).masks().any()
    many = grammars.guide({"choice": [f"choice {at}" for at in range(10_000)]})
    for _ in range(len("choice ")):
        many.advance(many.forced[0])
    assert many.masks().any()


def test_one_process_serves_all_grammars_until_one_ends_it(monkeypatch):
    started = []

    def counted(program):
        started.append(BoundedChild(program))
        return started[-1]

    monkeypatch.setattr(trials, "BoundedChild", counted)
    tokenizer = plain_bytes_as_tokens()
    made = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 1 << 20)
    for turn in range(20):
        made.guide({"regex": f"a{turn}"})
    assert len(started) == 1
    with pytest.raises(RequestError, match="compilation failed"):
        made.guide(rules(5_000))
    made.guide({"regex": "b"})
    assert len(started) == 2
    made.guide({"regex": "b"})  # compiled already: no process is asked
    made.close()
    assert started[-1].has_ended
    made.guide({"regex": "b"})
    assert len(started) == 2
    made.guide({"regex": "c"})
    assert len(started) == 3
    made.close()


def test_a_process_that_was_killed_is_replaced(grammars):
    grammars.guide({"regex": "before"})
    grammars._library.trials._process._child.kill()
    grammars._library.trials._process._child.wait()
    assert grammars.guide({"regex": "after"}).forced


def test_an_interrupted_trial_is_not_the_reply_to_the_next(grammars, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BoundedChild, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grammars.guide({"regex": "("})
    assert grammars.guide({"regex": "next"}).forced


FORKED = """
from forking import fork_all
from inl.guidance.grammars import Grammars
from plain_byte_tokens import plain_bytes_as_tokens

tokenizer = plain_bytes_as_tokens()
grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 999)
grammars.guide({"regex": "parent"})
process = grammars._library.trials._process

def work(index):
    assert len(grammars.guide({"regex": f"child {index}"}).forced) == 7
    assert grammars._library.trials._process._child.pid != process._child.pid

assert fork_all(2, work)() == [0, 0]
assert not process.has_ended
grammars.guide({"regex": "parent again"})
assert grammars._library.trials._process is process
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_process_of_its_own():
    run_script(FORKED)


def test_threads_may_share_grammars(grammars):
    failures = []

    def compile_some(number):
        for turn in range(5):
            try:
                text = bytes(grammars.guide({"choice": [f"{number}{turn}"]}).forced)
                assert len(text) == 2
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=compile_some, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_compiled_grammars_are_dropped_by_the_time_that_they_took(monkeypatch):
    from inl.guidance import grammars as module

    tokenizer = plain_bytes_as_tokens()
    made = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 1 << 20)
    monkeypatch.setattr(module, "MAX_CACHED", 4)
    for turn in range(9):
        made.guide({"regex": f"a{turn}"})
    assert len(made._compiled) == 4
    trial = trials.Trial(seconds=0.2, bytes=0)
    monkeypatch.setattr(made._library.trials, "run", lambda *_: trial)
    for turn in range(9):
        made.guide({"regex": f"b{turn}"})
    assert len(made._compiled) == 2
    made.close()


def test_schemas_as_text_and_as_values_are_the_same(grammars):
    schema = {"type": "object", "properties": {"a": {"format": "password"}}}
    for value in (schema, json.dumps(schema)):
        assert grammars.guide({"json_schema": value}).masks().any()
