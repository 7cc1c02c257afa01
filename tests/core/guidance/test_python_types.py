"""JSON schemas of Python's types and functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest
from pydantic import BaseModel, Field

from inl.engine.chat import tool_schemas
from inl.errors import RequestError
from inl.guidance.python_types import function_schema, type_schema
from inl.guidance.structured import read_structured


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Person:
    name: str
    age: int = 0
    tags: list[str] = field(default_factory=list)


class Place(TypedDict, total=False):
    city: str


class Model(BaseModel):
    name: str
    size: Annotated[int, Field(ge=0)] = 1


@dataclass
class Tree:
    children: list[Tree]


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, STRING), (int, {"type": "integer"}), (float, {"type": "number"}),
        (bool, {"type": "boolean"}), (Any, {}), (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict, {"type": "object"}),
        (dict[str, str], {"type": "object", "additionalProperties": STRING}),
        (Optional[str], {"anyOf": [STRING, {"type": "null"}]}),  # noqa: UP045
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Literal["a", 1], {"enum": ["a", 1]}), (Color, {"enum": ["red", "blue"]}),
        (Annotated[str, "a name"], {"type": "string", "description": "a name"}),
        (set[str], {"type": "array", "items": STRING, "uniqueItems": True}),
        (tuple[str, ...], {"type": "array", "items": STRING}),
        (
            tuple[str, str],
            {"type": "array", "prefixItems": [STRING] * 2, "items": False,
             "minItems": 2},
        ),
        (
            Place,
            {"type": "object", "properties": {"city": STRING}, "required": [],
             "additionalProperties": False},
        ),
        (
            Person,
            {
                "type": "object",
                "properties": {
                    "name": STRING, "age": {"type": "integer"},
                    "tags": {"type": "array", "items": STRING},
                },
                "required": ["name"], "additionalProperties": False,
            },
        ),
        (Model, Model.model_json_schema() | {"additionalProperties": False}),
    ],
)  # fmt: skip
def test_the_schema_of_a_type(hint, schema):
    assert type_schema(hint, "x") == schema


@pytest.mark.parametrize("hint", [complex, object(), Tree, list[bytes]])
def test_other_types_are_refused(hint):
    with pytest.raises(RequestError, match="x"):
        type_schema(hint, "x")


def weather(city: str, days: int = 1, *, unit: Literal["C", "F"] = "C") -> str:
    """Return the weather of a city.

    It is always fine.

    Args:
        city: Name of the city.
        days (int): How many days.
    """
    return f"{city} {days} {unit}"


def test_the_schema_of_a_function():
    assert function_schema(weather)["function"] == {
        "name": "weather",
        "description": "Return the weather of a city.\n\nIt is always fine.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city."},
                "days": {"type": "integer", "description": "How many days."},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    }


def test_functions_of_all_kinds():
    class Shop:
        def buy(self, what: str) -> None:
            """:param what: the thing"""

        def __call__(self, count: int) -> None: ...

    def bare(anything, *more, **rest): ...

    method, called, plain = tool_schemas([Shop().buy, Shop(), bare])
    assert method["function"]["parameters"]["properties"] == {
        "what": {"type": "string", "description": "the thing"}
    }
    assert "description" not in method["function"]
    assert called["function"]["name"] == "Shop"
    assert called["function"]["parameters"]["required"] == ["count"]
    assert plain["function"]["parameters"]["properties"] == {"anything": {}}


def test_tools_as_dicts():
    whole = {"type": "function", "function": {"name": "f"}}
    bare = {"name": "f", "parameters": {}}
    assert tool_schemas([whole, bare]) == [
        whole, {"type": "function", "function": bare},
    ]  # fmt: skip


@pytest.mark.parametrize("tools", ["f", {"name": "f"}, weather, [3], ["f"]])
def test_what_is_no_tool_is_refused(tools):
    with pytest.raises(RequestError, match="tools"):
        tool_schemas(tools)


@pytest.mark.parametrize(
    "value",
    [Model, Person, Place, {"type": "object"}, {"properties": {}, "title": "a"},
     {"$ref": "#/$defs/a", "$defs": {"a": True}}, {"anyOf": [True]}],
)  # fmt: skip
def test_structured_takes_classes_and_schemas(value):
    kind, text, _ = read_structured(value, 1 << 20)
    expected = type_schema(value, "x") if isinstance(value, type) else value
    assert kind == "json_schema"
    assert text == read_structured({"json_schema": expected}, 1 << 20).text


@pytest.mark.parametrize("value", [{}, {"regx": "a"}, str, Color, Person("a"), "a"])
def test_structured_refuses_others(value):
    with pytest.raises(RequestError, match="accepts"):
        read_structured(value, 1 << 20)
