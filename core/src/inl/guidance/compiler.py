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

SEPARATORS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON is written as ``json.dumps`` does; a schema's "x-guidance" may differ."""


def compile_matcher(lib: Any, vocabulary: Any, language: str, text: str) -> Any:
    """Return the matcher of a grammar.

    lib: ``llguidance``. language: "json_schema", "regex" or "lark". Raises
    ``ValueError`` for a grammar that is malformed or exceeds LIMITS.
    """
    make = lib.LLMatcher
    if language == "json_schema":
        source = make.grammar_from_json_schema(text, defaults=SEPARATORS)
    elif language == "regex":
        source = make.grammar_from_regex(text)
    else:
        source = make.grammar_from_lark(text)
    matcher = make(
        vocabulary, str(source), log_level=0, limits=lib.LLParserLimits(**LIMITS)
    )
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher
