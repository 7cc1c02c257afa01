"""The reader of JSON of others: bounds, one type of error, and no second reader."""

from __future__ import annotations

import ast
import json
import math
import random
from pathlib import Path

import pytest

import inl
from inl.bounded_json import (
    CHUNK,
    MAX_DEPTH,
    VALUE_BYTES,
    check_json,
    parse_json,
    parse_object,
    parse_prefix,
    read_json,
)
from inl.errors import InvalidJson, RequestError

SOURCES = Path(inl.__file__).parent

READERS = {
    "bounded_json.py": "the reader",
    "install_command.py": "what pip wrote; it is a layer below the reader",
    "bounded_child.py": "lines of this program's own children, and of their parent",
    "text/sandbox.py": "lines of the parent",
    "guidance/trial_process.py": "lines of the parent",
    "images/decoding_process.py": "lines of the parent",
    "fleet/local_engines.py": "lines of the parent",
    "testing/checkpoints_page.py": "data of this package",
    "testing/rank_checks.py": "lines of the child",
    "testing/rank_process.py": "lines of the parent",
    "tune/process.py": "lines of the child, which is this program",
    "tune/child.py": "lines of the parent",
    "serve/dialect.py": "decodes into types what check_json has accepted",
    "serve/batches/file_store.py": "decodes into types what check_json has accepted",
    "serve/batch_calls.py": "answers of its own endpoints",
    "serve/batch_file.py": "two fields of lines that begin as its own answers do",
    "serve/openai/responses_exchange.py": "what it stored of checked requests",
    "engine/moved_request.py": "what it has just encoded itself",
    "engine/answers/call_text.py": "splits members of a call that check_json accepts",
}
"""Modules that decode JSON themselves, and why they may."""


def decoders(source: str) -> list[str]:
    """Return what a module uses to decode JSON."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "msgspec.json"):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner == "json" and node.attr in ("load", "loads", "JSONDecoder"):
                found.append(f"{owner}.{node.attr}")
            if owner == "msgspec.json" and node.attr in ("decode", "Decoder"):
                found.append(f"{owner}.{node.attr}")
    return found


def test_no_other_module_decodes_json():
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if decoders(path.read_text("utf-8"))
    }
    assert found == set(READERS)


@pytest.mark.parametrize(
    "source",
    [
        "import json\nx = json.loads(y)",
        "from json import load",
        "import json\nD = json.JSONDecoder().raw_decode",
        "import msgspec\nmsgspec.json.decode(y)",
    ],
)
def test_the_search_finds_decoders(source):
    assert decoders(source)
    assert not decoders("import json\njson.dumps(x); msgspec.json.Encoder()")


BAD = {
    "empty": (b"", "line 1, column 1"),
    "cut": (b'{"a":\n', "line 2, column 1"),
    "no UTF-8": (b'"\xff"', "0xff"),
    "UTF-16": ('"a"'.encode("utf-16"), "not JSON"),
    "surrogates as UTF-8": (b'"\xed\xa0\x80"', "0xed"),
    "first half": (rb'["a", {"b": "\ud83d"}]', "half of a surrogate pair"),
    "second half": (rb'"\uDC00"', "half of a surrogate pair"),
    "in a key": (rb'{"\ud800": 1}', "half of a surrogate pair"),
    "deep lists": (b"[" * 300 + b"]" * 300, "300 levels"),
    "deep objects": (b'{"a":' * 100_000, "100000 levels"),
    "long integer": (b"-" + b"7" * 300, "integer of 301"),
    "integer beyond Python's limit": (b"7" * 5_000, "integer of 5000"),
    "great float": (b"[1e999]", "1e999"),
    "NaN": (b'{"a": NaN}', "found NaN"),
    "infinity": (b"-Infinity", "found -Infinity"),
    "two values": (b"1 2", "column 3"),
    "a lone mark": (b"\xef\xbb\xbf", "not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_said_in_one_kind_of_error(name):
    text, part = BAD[name]
    with pytest.raises(InvalidJson, match=r"^file x: ") as caught:
        parse_json(text, "file x")
    assert part in str(caught.value)
    assert isinstance(caught.value, RequestError)
    assert len(str(caught.value)) < 300


def test_a_text_with_half_of_a_pair_is_refused():
    with pytest.raises(InvalidJson, match="surrogates not allowed"):
        parse_json('"\udc80"', "argument")


def test_escaped_backslashes_and_whole_pairs_are_no_lone_surrogates():
    assert parse_json(rb'["\\ud800", "\ud83d\ude00"]', "x") == ["\\ud800", "😀"]


def test_values_are_those_of_json():
    draw = random.Random(3)

    def value(depth):
        kind = draw.randrange(7 if depth else 4)
        if kind == 0:
            return draw.choice([None, True, False])
        if kind == 1:
            return draw.randrange(-(10 ** draw.randrange(1, 290)), 10**9)
        if kind == 2:
            return draw.uniform(-1e300, 1e300)
        if kind == 3:
            return "".join(draw.choices('a"\\[]{},:é日😀\n\u2028', k=draw.randrange(9)))
        size = range(draw.randrange(5))
        if kind == 4:
            return {f"{value(0)}": value(depth - 1) for _ in size}
        return [value(depth - 1) for _ in size]

    for _ in range(300):
        wanted = value(6)
        for ascii_ in (True, False):
            text = json.dumps(wanted, ensure_ascii=ascii_)
            assert parse_json(text, "x") == wanted
            assert parse_json(text.encode("utf-8-sig"), "x") == wanted
            assert parse_prefix(f"[{text} rest", 1, "x") == (wanted, 1 + len(text))


def test_the_last_of_equal_keys_counts_unless_they_are_refused():
    text = b'{"a": 1, "b": {"c": 1, "c": 2}}'
    assert parse_object(text, "x") == {"a": 1, "b": {"c": 2}}
    with pytest.raises(InvalidJson, match="x: key 'c': found twice"):
        parse_object(text, "x", unique_keys=True)


def test_files_may_have_infinite_numbers():
    found = parse_json(b"[NaN, Infinity, -1e999]", "x", allow_nan=True)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("value", ["[1]", "null", '"a"', "3"])
def test_an_object_is_an_object(value):
    with pytest.raises(InvalidJson, match="accepted: one JSON object"):
        parse_object(value, "x")


@pytest.mark.parametrize("at", [CHUNK - 2, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
def test_only_what_is_outside_of_strings_has_depth_and_memory(at):
    r"""Strings with quotes, backslashes and brackets, across the pieces of a scan."""
    inside = r"\"[[{{::,,\\" * 30
    text = '["' + "a" * at + inside + '", ' + "[" * 200 + "]" * 200 + "]"
    check_json(text.encode(), "x", max_memory=201 * VALUE_BYTES[b"["] + 64)
    with pytest.raises(InvalidJson, match="values may take"):
        check_json(text.encode(), "x", max_memory=200 * VALUE_BYTES[b"["])
    deeper = text.replace("]" * 200, "[" * 56 + "]" * 256)
    with pytest.raises(InvalidJson, match=f"nested {MAX_DEPTH + 1} levels"):
        check_json(deeper.encode(), "x")


def test_size_is_bounded():
    with pytest.raises(InvalidJson, match="found 5 bytes of JSON, accepted: up to 4"):
        parse_json(b"[1,2]", "x", max_bytes=4)


def test_memory_is_bounded_before_the_parse(monkeypatch):
    monkeypatch.setattr("inl.bounded_json.json.loads", None)
    with pytest.raises(InvalidJson, match="values may take"):
        parse_json(b"[" + b"[]," * 1_000 + b"1]", "x", max_memory=100_000)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "none.json"
    with pytest.raises(InvalidJson, match="--tools: No such file"):
        read_json(path, "--tools")
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(path, "--tools") == [1]


def test_a_prefix_is_bounded_too():
    deep = "[" * 400 + "]" * 400
    for text in (deep, "[" * 100_000, '{"a": NaN}', '{"a": ', "7" * 5_000):
        with pytest.raises(InvalidJson, match=r"^call: "):
            parse_prefix("x" + text, 1, "call")
