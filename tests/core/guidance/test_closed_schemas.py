"""Objects of strict schemas that are silent about additional properties."""

from __future__ import annotations

import json

import pytest

from inl.errors import RequestError
from inl.guidance.closed_schemas import close_objects
from plain_byte_tokens import plain_bytes_as_tokens

NAME = {"type": "string"}
AGE = {"type": "integer"}


def person(**fields):
    return {"type": "object", "properties": {"name": NAME}, **fields}


CLOSED = person(additionalProperties=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (person(), CLOSED),
        (
            {"properties": {"name": NAME}},
            {"properties": {"name": NAME}, "additionalProperties": False},
        ),
        ({"type": "array", "items": person()}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [person(), AGE]}, {"anyOf": [CLOSED, AGE]}),
        (
            {"$defs": {"a/b": person()}, "$ref": "#/$defs/a~1b"},
            {"$defs": {"a/b": CLOSED}, "$ref": "#/$defs/a~1b"},
        ),
        ({"allOf": [person()]}, {"allOf": [CLOSED]}),
        ({"not": AGE, "items": person()}, {"not": AGE, "items": CLOSED}),
        # A property may have the name of a keyword.
        (
            {"properties": {"properties": person(), "enum": person()}},
            {
                "properties": {"properties": CLOSED, "enum": CLOSED},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_objects_with_named_properties_are_closed(given, expected):
    before = json.dumps(given)
    assert close_objects(given) == expected
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        person(additionalProperties=True),
        person(additionalProperties=AGE),
        person(patternProperties={"^x": AGE}),
        person(unevaluatedProperties=AGE),
        {"enum": [person()], "const": person(), "default": person()},
        {"allOf": [person(), {"properties": {"age": AGE}}]},
        person(anyOf=[{"properties": {"age": AGE}}, {"required": ["name"]}]),
        {
            "$defs": {"base": person()},
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"age": AGE}}],
        },
        {"$defs": {"base": person()}, "$ref": "#/$defs/base", "properties": {"a": AGE}},
    ],
)
def test_other_objects_stay_as_they_are(schema):
    assert close_objects(schema) == schema


def test_schemas_nested_too_deep_are_refused():
    schema = person()
    for _ in range(5_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested over 100 levels"):
        close_objects(schema)


def test_a_closed_object_allows_no_other_name_and_none_twice():
    pytest.importorskip("llguidance")
    from inl.guidance.grammars import Grammars

    tokenizer = plain_bytes_as_tokens()
    grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 1 << 20)
    schema = {"type": "object", "properties": {"name": NAME, "age": AGE}}

    def begins(schema, text):
        guide = grammars.guide({"json_schema": schema})
        return guide.accepts(tokenizer.encode(text, False)) == len(text.encode())

    try:
        closed = close_objects(schema)
        assert begins(closed, '{"name": "Bob", "age": 7}')
        assert not begins(closed, '{"name": "Bob", "age": 7, "')
        assert not begins(closed, '{"name": "Bob", "name"')
        assert not begins(closed, '{"other"')
        assert begins(schema, '{"other"')
    finally:
        grammars.close()
