"""Checks of schemas before they are compiled, and schemas within others."""

from __future__ import annotations

import json

import pytest

from inl.guidance.json_schemas import FORMATS, as_resource, checked_schema
from inl.guidance.structured import read_structured
from plain_byte_tokens import plain_bytes_as_tokens

pytest.importorskip("llguidance")
from inl.guidance.grammars import Grammars


@pytest.fixture(scope="module")
def grammars():
    tokenizer = plain_bytes_as_tokens()
    made = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 1 << 20)
    yield made
    made.close()


def matches(grammars, structured, text):
    """Whether a grammar allows a text as a beginning."""
    guide = grammars.guide(structured)
    return guide.accepts(plain_bytes_as_tokens().encode(text, False)) == len(
        text.encode()
    )


def test_formats_are_dropped_where_format_is_a_keyword():
    schema = {
        "type": "object",
        "format": "x",
        "properties": {
            "format": {"type": "string", "format": "password"},
            "const": {"items": [{"format": "uuid"}, {"format": "file-path"}]},
        },
        "$defs": {"default": {"anyOf": [{"format": "binary"}, {"format": "date"}]}},
        "default": {"format": "a value"},
        "enum": [{"format": "a value"}],
    }
    assert json.loads(checked_schema(json.dumps(schema), "structured")) == {
        "type": "object",
        "properties": {
            "format": {"type": "string"},
            "const": {"items": [{"format": "uuid"}, {}]},
        },
        "$defs": {"default": {"anyOf": [{}, {"format": "date"}]}},
        "default": {"format": "a value"},
        "enum": [{"format": "a value"}],
    }


def test_a_schema_without_such_formats_stays_as_it_is():
    text = '{"type":  "number", "minimum": 1e2, "format": "date"}'
    assert checked_schema(text, "structured") == text


@pytest.mark.parametrize("name", [*sorted(FORMATS), "password", "file-path", "int32"])
def test_all_formats_compile(grammars, name):
    schema = {"type": "string", "format": name, "maxLength": 400}
    free = matches(grammars, {"json_schema": schema}, '"no such thing')
    assert free == (name not in FORMATS)


def call(number, arguments):
    return json.dumps({"name": f"tool{number}", "arguments": arguments})


def calls(*parameters):
    """A schema of a call of any of several tools."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": f"tool{at}"},
                    "arguments": as_resource(each, f"tool/{at}"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for at, each in enumerate(parameters)
        ]
    }


def tool(reference, **definitions):
    return {
        "type": "object",
        "properties": {"size": {"$ref": reference}},
        "required": ["size"],
        **definitions,
    }


INTEGER = {"type": "integer"}
TOOLS = {
    "Pydantic": tool("#/$defs/Size", **{"$defs": {"Size": INTEGER}}),
    "a chain": tool(
        "#/$defs/A", **{"$defs": {"A": {"$ref": "#/$defs/B"}, "B": INTEGER}}
    ),
    "Zod": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/Tool",
        "definitions": {"Tool": tool("#/definitions/Size"), "Size": INTEGER},
    },
    "draft 4": tool(
        "#/definitions/Size",
        definitions={"Size": INTEGER},
        **{"$schema": "http://json-schema.org/draft-04/schema#"},
    ),
    "an anchor": tool(
        "#size", **{"$defs": {"Size": {"$anchor": "size", "type": "integer"}}}
    ),
    "another place": tool(
        "#/components/schemas/Size", components={"schemas": {"Size": INTEGER}}
    ),
    "an id of its own": tool(
        "http://x.y/tool#/$defs/Size",
        **{"$id": "http://x.y/tool", "$defs": {"Size": INTEGER}},
    ),
}
WORDS = tool(
    "#/$defs/Size",
    **{"$defs": {"Size": {"enum": ["big"]}, "A": {"$anchor": "size", "const": 1}}},
)


@pytest.mark.parametrize("name", TOOLS)
def test_references_stay_those_of_the_schema(grammars, name):
    structured = {"json_schema": calls(WORDS, TOOLS[name])}
    assert matches(grammars, structured, call(1, {"size": 12}))
    assert not matches(grammars, structured, call(1, {"size": "big"}))
    assert matches(grammars, structured, call(0, {"size": "big"}))
    assert not matches(grammars, structured, call(0, {"size": 12}))


def test_a_reference_to_the_whole_schema_is_to_the_tool(grammars):
    node = {
        "type": "object",
        "properties": {"value": INTEGER, "next": {"$ref": "#"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    structured = {"json_schema": calls(node)}
    assert matches(grammars, structured, call(0, {"value": 1, "next": {"value": 2}}))
    assert not matches(
        grammars, structured, call(0, {"value": 1, "next": {"name": "tool0"}})
    )


@pytest.mark.parametrize("letters", ["\x7f", "\x00\x1f", "\x80\ufeff", 'a"\\/\x7f\n'])
def test_any_text_may_be_a_choice(grammars, letters):
    structured = {"choice": [f"y{letters}", "no"]}
    assert matches(grammars, structured, f"y{letters}")
    assert not matches(grammars, structured, "yes")


def tag(structures, triggers):
    return {"structural_tag": {"structures": structures, "triggers": triggers}}


def part(begin, schema=None, end="</t>"):
    return {"begin": begin, "schema": schema or {}, "end": end}


def test_parts_of_tags_follow_their_triggers(grammars):
    definitions = {"$ref": "#/$defs/A", "$defs": {"A": INTEGER}}
    tags = tag(
        [part("<t\x7f>", INTEGER), part("<u>", definitions, "")], ["<u", "<t", "<t\x7f"]
    )
    assert matches(grammars, tags, "Some text. <t\x7f>12</t> and <u>7 more <u>8")
    assert not matches(grammars, tags, "<t>")
    assert not matches(grammars, tags, "<u>x")
    assert not matches(grammars, tags, '<t\x7f>"a"')


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (tag([part("<t>")] * 501, ["<t"]), "found 501 structures, accepts 1 to 500"),
        (tag([part("<t>")], ["<t"] * 501), "found 501 triggers, accepts 1 to 500"),
        (tag([], ["<t"]), "found 0 structures"),
        (tag([part("<t>")], ["<u"]), "begin '<t>' has no trigger"),
        (tag([part("<t" * 200)], ["<t"]), "accepts a string of 1 to 256 characters"),
        (tag([part("<t>"), {"begin": "<t"}], ["<t"]), "accepts structures of begin"),
        ({"structural_tag": "text"}, "accepts structures of begin, schema and end"),
    ],
)
def test_other_tags_are_refused(value, sentence):
    from inl.errors import RequestError

    with pytest.raises(RequestError, match=f"structured.structural_tag: .*{sentence}"):
        read_structured(value, 1 << 20)


def test_many_structures_and_triggers_are_matched_in_linear_time(grammars):
    structures = [part(f"<tool number {at}>") for at in range(500)]
    triggers = [f"<other {at}>" for at in range(498)] + ["<tool", "<tool number"]
    assert grammars.guide(tag(structures, triggers)).masks().any()
