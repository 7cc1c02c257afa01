"""Structured output: request fields as the engine's ``structured`` option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inl.bounded_json import parse_json
from inl.engine.answers.forced_call import ANY_OBJECT
from inl.errors import InvalidJson, RequestError
from inl.guidance.closed_schemas import close_objects
from inl.guidance.structural_tags import read_tag
from inl.serve.api_error import unsupported

FIELDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}
"""Fields of ``structured_outputs``, and the engine's names."""


GUIDED = {f"guided_{name}": name for name in FIELDS}
"""Fields of vLLM before 0.12, which some clients send, and those of
``structured_outputs``."""


def guided_of(request: object) -> dict[str, Any]:
    """Return ``structured_outputs`` of a request with fields of vLLM before 0.12."""
    given = {GUIDED[name]: getattr(request, name) for name in GUIDED}
    return {name: value for name, value in given.items() if value is not None}


def structure_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the engine's option; raises :class:`ApiError` for other structures.

    Objects of a JSON schema have no properties but those that it names, unless it
    states ``additionalProperties``: clients seldom state it, and a small model would
    write names without an end.
    """
    if structured_outputs is not None:
        return _outputs(structured_outputs)
    if response_format is None or response_format.get("type") == "text":
        return None
    kind = response_format.get("type")
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    if kind == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise unsupported("response_format", "needs json_schema.schema")
        return {"json_schema": _closed(schema, "response_format")}
    if kind == "structural_tag":
        return structural_tag(response_format, "response_format")
    raise unsupported(
        "response_format",
        f"found type {kind!r:.40}, accepts text, json_object, json_schema and "
        "structural_tag",
    )


def _closed(schema: Any, field: str) -> Any:
    try:
        return close_objects(schema)
    except RequestError as error:
        raise unsupported(field, str(error)) from error


def _outputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) != 1:
        raise unsupported(
            "structured_outputs",
            f"found {', '.join(given) or 'no field'}, accepts one of "
            f"{', '.join([*FIELDS, 'json_object', 'structural_tag'])}",
        )
    ((name, value),) = given.items()
    if name == "json_object" and value is True:
        return {"json_schema": ANY_OBJECT}
    if name == "structural_tag":
        return structural_tag(value, "structured_outputs.structural_tag")
    if name not in FIELDS:
        raise unsupported(f"structured_outputs.{name}", "is not supported")
    if name == "json":
        value = _closed(_schema(value), "structured_outputs.json")
    return {FIELDS[name]: value}


def _schema(value: Any) -> Any:
    """Return a schema, which may be a text."""
    try:
        return parse_json(value, "json") if isinstance(value, str) else value
    except InvalidJson as error:
        raise unsupported("structured_outputs.json", str(error)) from error


def structural_tag(value: Any, field: str) -> dict[str, Any]:
    """Return the structure of free text with tagged parts; raises :class:`ApiError`."""
    try:
        if isinstance(value, str):
            value = parse_json(value, "structural_tag")
        return {"structural_tag": read_tag(value, "structural_tag")}
    except RequestError as error:
        raise unsupported(field, str(error)) from error
