"""JSON schemas of Python's types, classes and functions."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from inl.errors import RequestError
from inl.guidance.closed_schemas import close_objects

PLAIN: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
    inspect.Parameter.empty: {},
}

ARRAYS: Final = (list, Sequence, set, frozenset, AbstractSet, tuple)
OBJECTS: Final = (dict, Mapping)

SECTION: Final = re.compile(r"^(Args|Arguments|Parameters):\s*$")
"""Title of the parameters in a docstring of Google's style."""

ENTRY: Final = re.compile(
    r"^\s*(?::param\s+)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s+(.+)$"
)
"""Description of one parameter: ``name: text``, ``name (type): text``, ``:param name:
text``."""


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function as chat templates and servers expect a tool.

    The parameters have the schemas of their type hints, the descriptions are those of
    the docstring: its text before the parameters, and lines ``name: text``. Raises
    :class:`~inl.errors.RequestError` for a hint that has no schema.
    """
    name = getattr(function, "__name__", type(function).__name__)
    return {
        "type": "function",
        "function": {
            "name": name,
            **_description(function),
            "parameters": _parameters(function, name),
        },
    }


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type.

    Of str, int, float, bool, None, Any, list, tuple, set, dict, unions, Optional,
    Literal, Annotated with a text, Enum, TypedDict, dataclasses and pydantic's models.
    where: for error messages. Raises :class:`~inl.errors.RequestError` for another one.
    """
    return _schema(hint, where, ())


def is_schema_class(value: object) -> bool:
    """Whether a value is a class that :func:`type_schema` describes as an object."""
    return isinstance(value, type) and (
        hasattr(value, "model_json_schema")
        or is_dataclass(value)
        or is_typeddict(value)
    )


def _description(function: Any) -> dict[str, str]:
    text = inspect.getdoc(function) or ""
    kept = []
    for line in text.splitlines():
        if SECTION.match(line) or line.lstrip().startswith(":param"):
            break
        kept.append(line)
    summary = "\n".join(kept).strip()
    return {"description": summary} if summary else {}


def _parameters(function: Any, name: str) -> dict[str, Any]:
    if hasattr(function, "model_json_schema"):  # a model of pydantic as a tool
        return _schema(function, name, ())
    try:
        signature = inspect.signature(function)
        hints = _hints(function, name)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"tools: {name}: {error}; accepts functions with a signature"
        ) from error
    described = _described(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        key = parameter.name
        schema = _schema(hints.get(key, parameter.empty), f"{name}({key})", ())
        if text := described.get(key):
            schema.setdefault("description", text)
        if parameter.default is parameter.empty:
            required.append(key)
        properties[key] = schema
    return {"type": "object", "properties": properties, "required": required}


def _described(text: str) -> dict[str, str]:
    """Return the lines of a docstring that describe a parameter."""
    found = map(ENTRY.match, text.splitlines())
    return {match[1]: match[2].strip() for match in found if match}


def _hints(owner: Any, name: str) -> dict[str, Any]:
    is_plain = inspect.isroutine(owner) or isinstance(owner, type)
    target = owner if is_plain else type(owner).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise RequestError(
            f"{name}: {error}; accepts type hints of names that its module has"
        ) from error


def _schema(hint: Any, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if hint in outer:
        raise RequestError(
            f"{where}: found {hint!r:.60} within itself; accepts types that end, or a "
            "JSON schema as a dict"
        )
    origin, inner = get_origin(hint), get_args(hint)
    try:
        if hint in PLAIN:
            return dict(PLAIN[hint])
    except TypeError:  # not hashable, as some arguments of Annotated
        pass
    if origin is Annotated:
        return _annotated(inner, where, outer)
    if origin in (Required, NotRequired):
        return _schema(inner[0], where, outer)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, where, outer) for each in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if (origin or hint) in ARRAYS:
        return _array(origin or hint, inner, where, outer)
    if (origin or hint) in OBJECTS:
        values = {} if len(inner) < 2 else _schema(inner[1], where, outer)
        return {
            "type": "object",
            **({"additionalProperties": values} if values else {}),
        }
    if isinstance(hint, type):
        return _class(hint, where, outer)
    raise _unknown(hint, where)


def _annotated(
    inner: tuple[Any, ...], where: str, outer: tuple[Any, ...]
) -> dict[str, Any]:
    schema = _schema(inner[0], where, outer)
    for each in inner[1:]:
        text = each if isinstance(each, str) else getattr(each, "description", None)
        if isinstance(text, str):
            schema["description"] = text
    return schema


def _array(
    kind: Any, inner: tuple[Any, ...], where: str, outer: tuple[Any, ...]
) -> dict[str, Any]:
    if kind is tuple and inner and inner[-1] is not ...:
        items = [_schema(each, where, outer) for each in inner]
        return {
            "type": "array", "prefixItems": items, "items": False,
            "minItems": len(items),
        }  # fmt: skip
    listed: dict[str, Any] = {"type": "array"}
    if inner:
        listed["items"] = _schema(inner[0], where, outer)
    if kind in (set, frozenset, AbstractSet):
        listed["uniqueItems"] = True
    return listed


def _class(cls: type, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if hasattr(cls, "model_json_schema"):
        # As dataclasses below; a model that allows others says so in its schema.
        schema: dict[str, Any] = close_objects(cls.model_json_schema())
        return schema
    if issubclass(cls, Enum):
        return {"enum": [each.value for each in cls]}
    if not is_dataclass(cls) and not is_typeddict(cls):
        raise _unknown(cls, where)
    hints = _hints(cls, cls.__name__)
    if is_dataclass(cls):
        required = [
            each.name
            for each in fields(cls)
            if each.default is MISSING and each.default_factory is MISSING
        ]
        hints = {each.name: hints[each.name] for each in fields(cls) if each.init}
    else:
        required = sorted(getattr(cls, "__required_keys__", ()), key=list(hints).index)
    return {
        "type": "object",
        "properties": {
            key: _schema(each, f"{where}.{key}", (*outer, cls))
            for key, each in hints.items()
        },
        "required": required,
        "additionalProperties": False,
    }


def _unknown(hint: Any, where: str) -> RequestError:
    return RequestError(
        f"{where}: found the type {hint!r:.60}; accepts str, int, float, bool, None, "
        "list, dict, unions, Literal, Enum, TypedDict, dataclasses and pydantic's "
        "models, or a JSON schema as a dict"
    )
