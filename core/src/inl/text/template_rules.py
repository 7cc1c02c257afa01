"""What a chat template may use: jinja2's sandbox, with limits on sizes.

Imported only by the sandbox process (:mod:`inl.text.sandbox`).
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import Any

MAX_SIZE = 1_000_000
"""Largest integer argument of a call or repetition, which could be a size."""

MAX_TEXT = 32 << 20
"""Length limit of a rendering in characters."""

BINARY = frozenset({"*", "**", "%", "+"})
TAGS = "for, if, set, macro, call, filter, raw and generation"


class RefusedError(Exception):
    """A template violates a rule of the sandbox."""


def make_environment() -> Any:
    """Build jinja2's sandbox with the functions and tags that chat templates use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the model's output; rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = BINARY

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, called: Any, /, *args: Any, **options: Any) -> Any:
            if not isinstance(called, jinja2.runtime.Macro):
                check_arguments(_name(called), args, options)
            return super().call(context, called, *args, **options)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is not None:
                check_fields(value.__self__)
            return wrapped

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise RefusedError(
                f"found attribute {attribute!r} of {type(obj).__name__!r}; accepted: "
                "public attributes that do not modify the object"
            )

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    environment.globals["namespace"] = _namespaces(jinja2.utils.Namespace)
    environment.filters["tojson"] = _to_json
    for name in ("center", "indent", "batch"):
        environment.filters[name] = _checked(name, environment.filters[name])
    environment.filters["format"] = _format
    return environment


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise RefusedError for an operator whose result would exceed the limits."""
    if operator == "*":
        for count, repeated in ((left, right), (right, left)):
            if isinstance(count, int) and count * _length(repeated) > MAX_SIZE:
                raise RefusedError(f"found '*' that repeats {count} times; {_limit()}")
    elif operator == "+" and _length(left) + _length(right) > MAX_TEXT:
        raise RefusedError(f"found '+' of over {MAX_TEXT} items; accepted: fewer")
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > 4096:
            raise RefusedError("found '**' of over 4096 bits; accepted: smaller powers")
    elif operator == "%" and isinstance(left, str):
        check_format(left)


def check_fields(text: str) -> None:
    """Raise RefusedError for a ``str.format`` width of 1000 or more."""
    if re.search(r":[^}]*\d{4}", text):
        raise RefusedError(f"found format {text[:40]!r}; accepted: widths below 1000")


def check_format(text: str) -> None:
    """Raise RefusedError for a ``%`` format width of 1000 or more, or of ``*``."""
    if re.search(r"%[^a-zA-Z%]*(?:\d{4}|\*)", text):
        raise RefusedError(f"found '%' with {text[:40]!r}; accepted: widths below 1000")


def check_arguments(name: str, args: Any, options: Any) -> None:
    """Raise RefusedError for an integer argument beyond MAX_SIZE."""
    for value in (*args, *options.values()):
        if isinstance(value, int) and abs(value) > MAX_SIZE:
            raise RefusedError(f"found argument {value} of {name!r}; {_limit()}")


def _name(called: Any) -> str:
    return str(getattr(called, "__name__", "call")).removeprefix("safe_")


def _limit() -> str:
    return f"accepted: up to {MAX_SIZE}"


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **options: Any) -> Any:
        check_arguments(name, args[1:], options)
        return function(*args, **options)

    return checked


def _format(value: Any, *args: Any, **options: Any) -> str:
    check_format(str(value))
    return str(value) % (options or args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON, with the arguments in the order of ``transformers``."""
    check_arguments("tojson", (indent,), {})
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise RefusedError(f"the template raised: {message}")


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _namespaces(base: Any) -> Callable[..., Any]:
    class Namespace(base):  # type: ignore[misc]
        """Attributes set by a template; names must not begin with an underscore."""

        def __setitem__(self, name: str, value: Any) -> None:
            _check_public(name)
            super().__setitem__(name, value)

    def namespace(*args: Any, **options: Any) -> Namespace:
        for name in dict(*args, **options):
            _check_public(name)
        return Namespace(*args, **options)

    return namespace


def _check_public(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise RefusedError(f"found attribute {name!r}; accepted: public names")


def compile_template(environment: Any, source: str) -> Any:
    """Compile a template; raises RefusedError for a tag that loads another one."""
    from jinja2 import nodes

    loading = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in environment.parse(source).find_all(loading):
        tag = type(node).__name__.lower()
        error = RefusedError(
            f"found {tag}, which loads another template; accepted: {TAGS}"
        )
        raise _at_line(error, node.lineno)
    return environment.from_string(source)


def _at_line(error: Exception, line: int | None) -> Exception:
    error.lineno = line  # type: ignore[attr-defined]
    return error
