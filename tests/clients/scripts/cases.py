"""What the scripts of all clients share: their cases, and how results are printed."""

from __future__ import annotations

import json
import sys
import traceback

QUESTION = "What is the capital of France?"
TOKENS = 24
CITIES = ("Rome", "Oslo")
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Parameters of the tool of the cases."""

COLOR = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["red", "green", "blue"]},
        "is_warm": {"type": "boolean"},
    },
    "required": ["name", "is_warm"],
    "additionalProperties": False,
}


URL, MODEL = sys.argv[1:3]
"""The server's address, without a path, and the name of its model."""


def error_of(kind, call):
    """Return the error of this class that a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_color(value):
    """Fail unless ``value``, or the JSON in it, is of the schema ``COLOR``."""
    if isinstance(value, str):
        value = json.loads(value)
    assert set(value) == {"name", "is_warm"}, value
    assert value["name"] in ("red", "green", "blue"), value
    assert isinstance(value["is_warm"], bool), value


def check_city(arguments):
    """Fail unless ``arguments``, or the JSON in it, is of the schema ``WEATHER``."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    assert set(arguments) == {"city"}, arguments
    assert arguments["city"] in CITIES, arguments


def weather(city):
    return f"{city}: sunny, 21 degrees"


def run(*cases):
    """Call each case; print its name and "ok" or the error. Ends the process."""
    failed = 0
    for case in cases:
        try:
            case()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            failed += 1
            lines = f"{type(error).__name__}: {error}".splitlines()
            result = "failed: " + " ".join(lines)[:300]
        else:
            result = "ok"
        print(f"case {case.__name__} {result}", flush=True)
    sys.exit(failed > 0)
