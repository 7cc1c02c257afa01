"""Generator of docs/python-api.md: ``python -m inl.testing.python_page``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from inl.engine.answers.chat_answer import ChatAnswer, ToolCall
from inl.engine.inference_engine import InferenceEngine
from inl.engine.options import GenerationOptions
from inl.engine.records import Stats
from inl.engine.request_handle import Completion, RequestHandle
from inl.engine.text_piece import TextPiece, TokenUsage
from inl.scheduling.sampling_params import TokenLogprob
from inl.testing.source_fields import fields_of, markdown

HEAD = """\
# Python API

Every public method of `inl.InferenceEngine`, and of what its methods return.
[Generating text](generating.md) is the tutorial, [engine
configuration](engine-config.md) has the fields of `EngineConfig`. This page is written
by
`python -m inl.testing.python_page > docs/python-api.md`.

```python
from inl import EngineConfig, InferenceEngine

with InferenceEngine.from_pretrained(config=EngineConfig(backend="cpu")) as engine:
    print(engine.generate("The capital of France is", max_tokens=5).text)
```
"""

CLASSES: tuple[type, ...] = (
    InferenceEngine, GenerationOptions, Completion, ChatAnswer, ToolCall, TextPiece,
    TokenUsage, TokenLogprob, RequestHandle, Stats,
)  # fmt: skip
"""Sections of the page, in order."""


def python_page() -> str:
    """Return the Markdown of the whole page."""
    return "\n".join([HEAD, *map(_section, CLASSES)])


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, and of its bases in INL."""
    kinds = (property, classmethod, staticmethod)
    for owner in cls.__mro__:
        if not owner.__module__.startswith("inl."):
            continue
        for name, member in vars(owner).items():
            if not name.startswith("_") and (
                isinstance(member, kinds) or inspect.isfunction(member)
            ):
                yield name, member


def _section(cls: type) -> str:
    parts = [f"## {cls.__name__}", markdown(_docstring(cls))]
    if cls is InferenceEngine:
        parts.append(f"```text\n{_signature(cls.__name__, cls.__init__)}\n```")
    parts += [_field(field) for field in fields_of(cls) if not _is_private(field.name)]
    parts += [_member(cls, *each) for each in public_members(cls)]
    return "\n\n".join(parts) + "\n"


def _is_private(name: str) -> bool:
    return name.startswith("_")


def _field(field: Any) -> str:
    default = f", default `{field.default}`" if field.default else ""
    text = f": {markdown(field.doc)}" if field.doc else ""
    return f"- `{field.name}` (`{field.type}`{default}){_indented(text)}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def _member(cls: type, name: str, member: Any) -> str:
    text = markdown(_docstring(member))
    if isinstance(member, property):
        getter: Any = member.fget
        kind = _annotation(inspect.signature(getter).return_annotation)
        return f"### {cls.__name__}.{name}\n\nProperty, `{kind}`. {text}"
    function = getattr(member, "__func__", member)
    return (
        f"### {cls.__name__}.{name}\n\n```text\n{_signature(name, function)}\n```"
        f"\n\n{text}"
    )


def _docstring(member: Any) -> str:
    text = inspect.getdoc(member)
    assert text, f"{member}: has no docstring"
    return text


def _signature(name: str, function: Any) -> str:
    """Return a signature, with one parameter per line if it is long."""
    signature = inspect.signature(function)
    parameters = []
    has_star = False
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parameters.append("*")
            has_star = True
        parameters.append(_parameter(parameter))
    prefix = "async " if _is_async(function) else ""
    result = _annotation(signature.return_annotation)
    end = "" if name == "InferenceEngine" else f" -> {result}"
    line = f"{prefix}{name}({', '.join(parameters)}){end}"
    if len(line) <= 88:
        return line
    rows = "".join(f"    {each},\n" for each in parameters)
    return f"{prefix}{name}(\n{rows}){end}"


def _is_async(function: Any) -> bool:
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(kind(function) for kind in kinds)


def _parameter(parameter: inspect.Parameter) -> str:
    marks: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = marks.get(parameter.kind, "") + parameter.name
    text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {parameter.default!r}"
    return text


def _annotation(annotation: Any) -> str:
    return re.sub(r"\s+", " ", str(annotation)).strip()


if __name__ == "__main__":
    sys.stdout.write(python_page())
