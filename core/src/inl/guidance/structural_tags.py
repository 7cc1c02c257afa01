"""Structural tags: free text with parts that match JSON schemas."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

from inl.bounded_json import parse_json
from inl.errors import RequestError
from inl.guidance.json_schemas import check_schema
from inl.guidance.lark_text import literal

MAX_COUNT: Final = 500
"""Structures, and triggers."""

MAX_LENGTH: Final = 256
"""Characters of a begin, an end or a trigger."""

ANY_TEXT: Final = r"/(.|\n)*/"

FORM: Final = "accepts structures of begin, schema and end, and triggers"


def read_tag(value: Any, where: str) -> dict[str, Any]:
    """Return the structures and triggers of a tag.

    where: prefix of error messages. Raises :class:`~inl.errors.RequestError` for
    another form, and for one that exceeds a limit.
    """
    tag = value if isinstance(value, Mapping) else {}
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not _is_list(structures) or not _is_list(triggers):
        raise RequestError(f"{where}: found {reprlib.repr(value):.60}, {FORM}")
    for name, items in (("structures", structures), ("triggers", triggers)):
        if not 1 <= len(items) <= MAX_COUNT:
            raise RequestError(
                f"{where}: found {len(items)} {name}, accepts 1 to {MAX_COUNT}"
            )
    for each in triggers:
        _check_text(each, where, least=1)
    for part in structures:
        if not isinstance(part, Mapping) or not isinstance(part.get("schema"), Mapping):
            raise RequestError(f"{where}: found {reprlib.repr(part):.60}, {FORM}")
        _check_text(part.get("begin"), where, least=1)
        _check_text(part.get("end"), where, least=0)
    _find_triggers([part["begin"] for part in structures], triggers, where)
    return {
        "structures": [
            {name: part[name] for name in ("begin", "schema", "end")}
            for part in structures
        ],
        "triggers": list(triggers),
    }


def tag_grammar(text: str, where: str) -> str:
    """Return the grammar in Lark's syntax of a tag that :func:`read_tag` returned.

    Raises :class:`~inl.errors.RequestError` for a schema that exceeds a limit.
    """
    tag = parse_json(text, where)
    begins = [part["begin"] for part in tag["structures"]]
    found, rules = _find_triggers(begins, tag["triggers"], where), []
    for at, part in enumerate(tag["structures"]):
        begin, schema, trigger = part["begin"], part["schema"], found[at]
        check_schema(schema, where)
        before, after = literal(begin[len(trigger) :]), literal(part["end"])
        rules += [
            f"trigger_{at}[lazy]: TEXT {literal(trigger)}",
            f"tag_{at}: trigger_{at} {before} %json {json.dumps(schema)} {after}",
        ]
    tags = " | ".join(f"tag_{at}" for at in range(len(tag["structures"])))
    head = ["%llguidance {}", f"start: ({tags})* rest", "rest: TEXT"]
    return "\n".join([*head, f"TEXT: {ANY_TEXT}", *rules])


def _find_triggers(
    begins: Sequence[str], triggers: Sequence[str], where: str
) -> list[str]:
    """Return the first trigger with which each text begins."""
    order = {each: at for at, each in reversed(list(enumerate(triggers)))}
    lengths = {len(each) for each in triggers}
    found = []
    for begin in begins:
        prefixes = {begin[:length] for length in lengths} & order.keys()
        if not prefixes:
            raise RequestError(f"{where}: begin {begin!r:.40} has no trigger")
        found.append(min(prefixes, key=order.__getitem__))
    return found


def _check_text(value: Any, where: str, *, least: int) -> None:
    if not isinstance(value, str) or not least <= len(value) <= MAX_LENGTH:
        raise RequestError(
            f"{where}: found {reprlib.repr(value):.60} as begin, end or trigger, "
            f"accepts a string of {least} to {MAX_LENGTH} characters"
        )


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
