"""Grammars that a hostile client might send, made from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

OBJECT = {"type": "object"}
PARTS = (
    "a",
    "[a-z]",
    ".",
    "\\w",
    "(?i:k)",
    "\\p{L}",
    "é",
    "[^x]",
    "\\d+",
    "(a|aa)",
    "",
)
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
INSERTS = ("(", ")", "{", "}", "[", "]", "\\", "*", '"', "\x7f", "\x00", "é", "%", "|")


def hostile_grammar(seed: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a kind, and the option ``structured``."""
    random = Random(seed)
    make = random.choice(KINDS)
    value = make(random)
    if random.random() < 0.1:
        ((kind, body),) = value.items()
        if kind in ("regex", "lark", "json_schema"):
            text = body if isinstance(body, str) else json.dumps(body)
            value = {kind: _damaged(random, text)}
    return make.__name__.strip("_"), value


def _size(random: Random, most: int) -> int:
    """Return 1 to ``most``: any order of magnitude as likely as another, or large."""
    return int(most ** (random.random() if random.random() < 0.7 else 1.0))


def _damaged(random: Random, text: str) -> str:
    for _ in range(_size(random, 8)):
        at = random.randrange(len(text) + 1)
        part = text[at : at + _size(random, 40)]
        text = text[:at] + random.choice((random.choice(INSERTS), part * 2)) + text[at:]
    return text


def _reference_chain(random: Random) -> dict[str, Any]:
    count = _size(random, 1_100)
    wrap: Callable[[Any], Any] = random.choice(
        (
            lambda part: {**OBJECT, "properties": {"a": part}, "required": ["a"]},
            lambda part: {"type": "array", "items": part, "minItems": 1},
            lambda part: {"anyOf": [part, {"type": "null"}]},
            lambda part: {"allOf": [part]},
            lambda part: part,
        )
    )
    names = {f"d{at}": wrap({"$ref": f"#/$defs/d{at + 1}"}) for at in range(count)}
    names[f"d{count}"] = random.choice(
        ({"type": "integer"}, {"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/none"}, {})
    )
    return {"json_schema": {"$defs": names, "$ref": "#/$defs/d0"}}


def _doubling(random: Random) -> dict[str, Any]:
    """Definitions of which each refers to the next one several times."""
    count, key = _size(random, 40), random.choice(("anyOf", "allOf", "oneOf"))
    names = {}
    for at in range(count):
        next_one = {"$ref": f"#/$defs/d{at + 1}"}
        names[f"d{at}"] = {
            key: [{**OBJECT, "properties": {name: next_one}} for name in "ab"]
        }
    names[f"d{count}"] = {"type": "integer"}
    return {"json_schema": {"$defs": names, "$ref": "#/$defs/d0"}}


def _wide(random: Random) -> dict[str, Any]:
    part = random.choice(({"type": "string"}, {}, {"enum": list(range(9))}, OBJECT))
    names = {f"p{at}": part for at in range(_size(random, 6_000))}
    schema = {**OBJECT, "properties": names}
    if random.random() < 0.5:
        schema |= {"required": list(names), "additionalProperties": False}
    return {"json_schema": schema}


def _deep(random: Random) -> dict[str, Any]:
    depth = _size(random, 2_000)
    begin, end = random.choice(
        (('{"items":', "}"), ('{"properties":{"a":', "}}"), ('{"anyOf":[', "]}"),
         ('{"const":[', "]}"), ("[", "]"))
    )  # fmt: skip
    return {"json_schema": begin * depth + random.choice(("{}", "")) + end * depth}


def _intersections(random: Random) -> dict[str, Any]:
    parts = [
        {"anyOf": [{"properties": {f"{name}{at}": {"type": random.choice(TYPES)}}}
                   for name in "abc"[: random.randint(1, 3)]]}
        for at in range(_size(random, 60))
    ]  # fmt: skip
    return {"json_schema": {"allOf": parts}}


def _values(random: Random) -> dict[str, Any]:
    count = _size(random, 20_000)
    return {
        "json_schema": random.choice(
            (
                {"enum": [f"value {at * 7919 % count}" for at in range(count)]},
                {"const": "word " * count * 4},
                {"enum": [list(range(count))] * 3},
            )
        )
    }


def _numbers(random: Random) -> dict[str, Any]:
    bound = random.choice((10**9, 2**63, 10**40, 1e308, 1e-300, 0.1, -7, 1 << 300))
    fields = ["minimum", "maximum", "multipleOf", "exclusiveMinimum"]
    chosen = random.sample(fields, random.randint(1, 3))
    schema = {name: bound * random.choice((1, 3)) for name in chosen}
    return {"json_schema": {"type": random.choice(("integer", "number")), **schema}}


def _lengths(random: Random) -> dict[str, Any]:
    most = _size(random, 10**9)
    return {
        "json_schema": random.choice(
            (
                {"type": "string", "maxLength": most, "minLength": most // 2},
                {"type": "array", "minItems": most, "items": {"type": "integer"}},
                {"type": "string", "pattern": _expression(random), "maxLength": most},
                {**OBJECT, "minProperties": most, "maxProperties": most},
            )
        )
    }


def _patterns(random: Random) -> dict[str, Any]:
    names = {
        _expression(random): {"type": random.choice(TYPES)}
        for _ in range(_size(random, 30))
    }
    return {"json_schema": {**OBJECT, "patternProperties": names}}


def _expression(random: Random, depth: int = 0) -> str:
    if depth > 3 or random.random() < 0.2:
        return random.choice(PARTS)
    left, right = (_expression(random, depth + 1) for _ in "ab")
    bound = _size(random, 2_000)
    return random.choice(
        (
            left + right, f"({left}|{right})", f"({left})*", f"({left})+{right}",
            f"({left}){{{bound}}}", f"({left}){{0,{bound}}}{right}", f"({left}){{1,}}",
        )
    )  # fmt: skip


def _regex(random: Random) -> dict[str, Any]:
    expression = _expression(random)
    if random.random() < 0.2:
        depth = _size(random, 20_000)
        expression = f"{'(' * depth}{expression}{')' * depth}"
    if random.random() < 0.2:
        expression = f"(a|b)*a(a|b){{{_size(random, 300)}}}"
    return {"regex": expression or "a"}


def _rule_chain(random: Random) -> dict[str, Any]:
    count, name = _size(random, 5_000), random.choice(("r", "R"))
    form = random.choice(("{}", '{} "x"', '"x" | {}', "{}?", "({})*", "{} {}"))
    first = f"{name}0"
    lines = [f"start: {first}"]
    lines += [
        f"{name}{at}: {form.replace('{}', f'{name}{at + 1}')}" for at in range(count)
    ]
    last = random.choice(('"a"', "/[a-z]+/", first))
    return {"lark": "\n".join([*lines, f"{name}{count}: {last}"])}


def _nested_rule(random: Random) -> dict[str, Any]:
    depth = _size(random, 25_000)
    begin, end = random.choice((("(", ")"), ("[", "]"), ("(", ")*"), ("~(", ")")))
    name = random.choice(("start", "start: A\nA"))
    return {"lark": f'{name}: {begin * depth}"a"{end * depth}'}


def _ambiguous(random: Random) -> dict[str, Any]:
    parts = ["s", '"a"', '"aa"', "/a*/", "s?", "(s | s s)", '""', "/[ab]{1,30}/", "t"]
    lines = []
    for name in ("s", "t"):
        options = [
            " ".join(random.choice(parts) for _ in range(random.randint(1, 6)))
            for _ in range(_size(random, 200))
        ]
        lines.append(f"{name}: {' | '.join(options)}")
    repeat = random.choice(("", "+", f"{{1,{_size(random, 100_000)}}}"))
    return {"lark": "\n".join([f"start: s{repeat}", *lines])}


def _operators(random: Random) -> dict[str, Any]:
    terms = [f"/{_expression(random) or 'a'}/" for _ in range(_size(random, 30))]
    text = terms[0]
    for each in terms[1:]:
        text = f"({text}) {random.choice(('&', '|', ' ', '& ~'))} {each}"
    return {"lark": f"start: A\nA: {text}"}


def _separators(random: Random) -> dict[str, Any]:
    """Texts between values that may continue what comes before or behind them."""
    item = random.choice(({"const": 1}, {"type": "integer"}, {"enum": ["x", "y"]}))
    names = ("item_separator", "key_separator", "whitespace_pattern")
    options = {name: _expression(random) for name in names if random.random() < 0.6}
    options["item_separator"] = random.choice(("1+", " , ", "[, ]+", ","))
    array = {"type": "array", "minItems": _size(random, 99), "items": item}
    return {"json_schema": {**array, "x-guidance": options}}


def _endless(random: Random) -> dict[str, Any]:
    """Terminals that take all of the text, so that what follows them never comes."""
    first = random.choice(("/a+/", "/a*/", "/[ab]+/", "/(.|\\n)*/", "A"))
    rest = random.choice(('"a"', 's "a"', "s s", '"a"+', "/a/ s"))
    begin = random.choice(("", '"x" | "y" ', '("x" | "y") '))
    return {"lark": f'start: {begin}s\ns: {first} {rest} | "a"\nA: /a+/ /a+/'}


def _choices(random: Random) -> dict[str, Any]:
    count, length = _size(random, 12_000), _size(random, 60)
    letters = 'abcdefgh \x7f\x00é日\n"\\'
    return {
        "choice": ["".join(random.choices(letters, k=length)) for _ in range(count)]
    }


def _tags(random: Random) -> dict[str, Any]:
    count = _size(random, 700)
    structures = [
        {"begin": f"<t{at}>", "schema": random.choice(({}, OBJECT)), "end": "</t>"}
        for at in range(count)
    ]
    triggers = [f"<u{at}>" for at in range(_size(random, 500) - 1)] + ["<t"]
    return {"structural_tag": {"structures": structures, "triggers": triggers}}


KINDS = (
    _reference_chain, _doubling, _wide, _deep, _intersections, _values, _numbers,
    _lengths, _patterns, _regex, _rule_chain, _nested_rule, _ambiguous, _operators,
    _choices, _tags, _separators, _endless,
)  # fmt: skip
