"""Prompts and schemas from standard input, files and the command line."""

from __future__ import annotations

import io
import json
import os

import pytest

from depth import mostly_full
from inl.cli import chat_input, prompt_input
from inl.cli.chat_input import PipedLines
from inl.cli.prompt_input import read_prompt, read_schema
from inl.errors import RequestError


@pytest.fixture
def stdin(monkeypatch):
    """Replace standard input."""

    def put(data):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))

    return put


@pytest.mark.parametrize("prompt", [None, "-"])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"Hello\n", "Hello"),
        (b"Hello\r\n", "Hello"),
        (b"a\n\nb\n\n", "a\n\nb\n"),
        ("\ufeffgrüß 日本".encode(), "grüß 日本"),
        (b" - ", " - "),
        (b"@name", "@name"),
    ],
)
def test_standard_input(stdin, prompt, data, text):
    stdin(data)
    assert read_prompt(prompt) == text


@pytest.mark.parametrize("text", ["", "hi", "a@b", "--", " @x", "-x"])
def test_a_text_is_itself(text):
    assert read_prompt(text) == text


@pytest.mark.parametrize(
    ("data", "text"), [("Hé 日".encode(), "Hé 日"), (b"\xe9", "\udce9")]
)
def test_an_argument_is_utf_8_in_any_locale(data, text):
    """Python has escaped the bytes that the locale cannot decode."""
    word = data.decode("ascii", "surrogateescape")
    assert read_prompt(word) == text
    assert read_prompt(f"@@{word}") == f"@{text}"


def test_a_file_and_the_escape(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_prompt(f"@{path}") == "one\r\ntwo"
    assert read_prompt("@@alice, hello") == "@alice, hello"
    assert read_prompt("@@") == "@"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "standard input is empty; accepted: PROMPT, @FILE, or -"),
        (b"\n", "standard input is empty"),
        (b"ab\xffcd", "standard input: found the byte 0xff at byte 2; accepted: UTF-8"),
        ("hi".encode("utf-16"), "standard input: found UTF-16 at byte 0"),
        (b"a" * 65, "standard input: found more than 64 bytes"),
    ],
)
def test_a_standard_input_that_is_no_prompt(stdin, monkeypatch, data, sentence):
    monkeypatch.setattr(prompt_input, "MAX_BYTES", 64)
    stdin(data)
    with pytest.raises(RequestError, match=sentence):
        read_prompt("-")


def test_a_terminal_without_a_prompt_is_not_read(stdin, monkeypatch):
    stdin(b"typed")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(RequestError, match="PROMPT: missing; accepted: PROMPT, @FILE"):
        read_prompt(None)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match=r"@none: cannot be read.*@@ begins a text"):
        read_prompt("@none")
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompt(f"@{tmp_path}")
    (tmp_path / "bad").write_bytes(b"\x80")
    with pytest.raises(RequestError, match="bad: found the byte 0x80 at byte 0"):
        read_prompt(f"@{tmp_path / 'bad'}")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_a_schema_is_a_file_or_a_text(tmp_path):
    (tmp_path / "schema.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(SCHEMA).encode()
    )
    for value in (json.dumps(SCHEMA), f"\n {json.dumps(SCHEMA)}"):
        assert read_schema(value) == {"json_schema": SCHEMA}
    assert read_schema(str(tmp_path / "schema.json")) == {"json_schema": SCHEMA}
    assert read_schema(None) is None


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("{x", "--json-schema: .*accepted: a schema as JSON"),
        ("[1]", r"--json-schema: found \[1\]; accepted: a schema, a JSON object"),
        ("none.json", "none.json: cannot be read: No such file"),
        ("[" * 100_000, "--json-schema: .*accepted: a schema as JSON"),
    ],
)
def test_a_schema_that_is_none(value, sentence):
    with pytest.raises(RequestError, match=sentence):
        read_schema(value)


def test_lines_of_a_pipe_are_utf_8(stdin, monkeypatch):
    stdin("\ufeffgrüß\r\n\n  日本 \nlast".encode())
    assert list(PipedLines()) == ["grüß", "日本", "last"]
    stdin(b"one\n\xff\n")
    lines = iter(PipedLines())
    assert next(lines) == "one"
    with pytest.raises(RequestError, match="found the byte 0xff at byte 0"):
        next(lines)
    monkeypatch.setattr(chat_input, "MAX_BYTES", 8)
    stdin(b"123456789\n")
    with pytest.raises(RequestError, match="found more than 8 bytes"):
        next(iter(PipedLines()))


@pytest.fixture
def generate(inl, tiny_folder):
    def run(*words, data=b"", options=("--json",)):
        reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
        fixed = ("--model", str(tiny_folder), "--device", "reference", *options)
        done = inl("generate", *words, *fixed, "--max-tokens", "3", stdin=reader)
        os.close(reader)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if "--json" in options else done

    return run


def test_generate_reads_a_pipe(generate):
    """The template of the model adds three tokens to a message, a byte is one."""
    assert generate(data=b"Hello\n")["prompt_tokens"] == len("Hello") + 3
    assert generate("-", data=b"Hello")["prompt_tokens"] == len("Hello") + 3
    assert generate("Hi", data=b"Hello")["prompt_tokens"] == len("Hi") + 3
    assert generate("@@Hi")["prompt_tokens"] == len("@Hi") + 3


def test_the_system_prompt_is_a_message(generate):
    found = generate("Hi", "--system", "Be brief")
    assert found["prompt_tokens"] == len("Hi") + len("Be brief") + 2 * 3


def test_a_system_prompt_needs_the_template(inl, tiny_folder):
    words = ("generate", "Hi", "--raw", "--system", "x", "--model", str(tiny_folder))
    done = inl(*words)
    assert done.returncode == 2
    assert "--system: needs the chat template; leave out --raw" in done.stderr


@pytest.mark.parametrize("seed", mostly_full(range(4)))
def test_the_answer_follows_the_schema(generate, seed):
    pytest.importorskip("llguidance")
    words = ("Hi", "--temperature", "1", "--seed", str(seed))
    schema = '{"enum": [17, 42]}'
    assert generate(*words)["text"] not in {"17", "42"}
    assert generate(*words, "--json-schema", schema)["text"] in {"17", "42"}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ('{"type": "objct"}', "structured.json_schema: Invalid type: objct"),
        ('{"type": "string", "pattern": "("}', "error: unclosed group"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_one_line(
    inl, tiny_folder, schema, sentence
):
    pytest.importorskip("llguidance")
    fixed = ("--model", str(tiny_folder), "--device", "reference")
    done = inl("generate", "Hi", *fixed, "--json-schema", schema)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert sentence in line


def test_an_answer_of_one_step_has_no_speed(generate):
    pytest.importorskip("llguidance")
    timings = generate("Hi", "--json-schema", '{"const": 42}')["timings"]
    assert timings["decode_tokens_per_second"] is None


def test_chat_follows_the_schema(inl, tiny_folder, tmp_path):
    pytest.importorskip("llguidance")
    (tmp_path / "lines").write_text("Hi\nAgain\n")
    with (tmp_path / "lines").open() as lines:
        done = inl(
            "chat", "--model", str(tiny_folder), "--device", "reference",
            "--json-schema", '{"const": 42}', stdin=lines,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n42\n", "")


def test_a_truncated_answer_is_reported_on_standard_error(generate):
    done = generate("Hi", options=("--seed", "0"))
    assert done.stderr == "[stopped at 3 tokens; --max-tokens]\n"
    assert "stopped" not in done.stdout
    assert generate("Hi")["finish_reason"] == "length"
