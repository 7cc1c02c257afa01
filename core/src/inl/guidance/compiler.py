"""Calls ``llguidance`` to compile a grammar."""

from __future__ import annotations

from typing import Any, Final

LIMITS: Final = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "max_grammar_size": 200_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Bounds of the work for the lexer of a grammar and for each of its masks."""

MAX_CLIENT_ROW: Final = 500
"""States of a parser at one place of the text, for a client's own grammar: a step takes
the square of it where the grammar is ambiguous, 20 ms for this many."""

SEPARATORS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON is written as ``json.dumps`` does; a schema's "x-guidance" may differ."""


def compile_matcher(lib: Any, vocabulary: Any, kind: str, text: str) -> Any:
    """Return the matcher of a grammar.

    lib: ``llguidance``. kind: field of the option ``structured``. text: in the language
    of "json_schema" or "regex", or in Lark's syntax for other kinds. Raises
    ``ValueError`` for a grammar that is malformed or exceeds LIMITS.
    """
    make, limits = lib.LLMatcher, dict(LIMITS)
    if kind == "json_schema":
        source = make.grammar_from_json_schema(text, defaults=SEPARATORS)
    elif kind == "regex":
        source = make.grammar_from_regex(text)
    else:
        source = make.grammar_from_lark(text)
    if kind == "lark":
        limits["max_items_in_row"] = MAX_CLIENT_ROW
    matcher = make(
        vocabulary, str(source), log_level=0, limits=lib.LLParserLimits(**limits)
    )
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher
