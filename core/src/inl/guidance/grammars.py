"""Compiles structured outputs to guides, with the package ``llguidance``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inl.errors import MissingPackage, RequestError
from inl.forks import on_fork
from inl.guidance.matcher_guide import MatcherGuide
from inl.guidance.structured import GrammarText, read_structured
from inl.guidance.vocabulary import Vocabulary

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

MAX_CACHED = 64
"""Compiled grammars kept for requests with the same one."""

LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "max_grammar_size": 200_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Bounds of the work for a grammar and for each of its masks: about a second."""

SEPARATORS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON is written as ``json.dumps`` does; a schema's "x-guidance" may differ."""


class Grammars:
    """Compiles grammars for one vocabulary. Thread-safe.

    tokenizer: returns the tokenizer. vocab: number of logits. end_ids: the model's end
    tokens, which are allowed where the output is complete. max_bytes: maximum size of a
    grammar.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab: int,
        end_ids: Sequence[int],
        max_bytes: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._end_ids = [each for each in end_ids if each < vocab]
        self._max_bytes = max_bytes
        self.after_fork_in_child()
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Drop what is compiled: a thread of the parent may hold a lock of it."""
        self._guides: dict[GrammarText, MatcherGuide] = {}
        self._vocabulary: Any = None

    def guide(self, structured: Any) -> MatcherGuide:
        """Return a guide for a ``structured`` option.

        Raises :class:`~inl.errors.RequestError` for a grammar that cannot be compiled
        and :class:`~inl.errors.MissingPackage`.
        """
        grammar = read_structured(structured, self._max_bytes)
        # No lock, which an exception may leave locked: threads may compile twice.
        guides = self._guides
        guide = guides.get(grammar)
        if guide is None:
            for oldest in list(guides)[: len(guides) + 1 - MAX_CACHED]:
                guides.pop(oldest, None)
            guide = guides[grammar] = self._compile(grammar)
        return guide.copy()

    def _compile(self, grammar: GrammarText) -> MatcherGuide:
        lib = library()
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(
                lib, self._tokenizer(), self._vocab, self._end_ids
            )
        matcher = lib.LLMatcher(
            self._vocabulary,
            _source(lib, grammar),
            log_level=0,
            limits=lib.LLParserLimits(**LIMITS),
        )
        where = f"structured.{grammar.kind}"
        if matcher.is_error():
            raise RequestError(f"{where}: {matcher.get_error():.300}")
        guide = MatcherGuide(matcher, where, self._vocab, self._end_ids)
        if not guide.masks().any():
            raise RequestError(f"{where}: allows no output of this vocabulary")
        return guide


def _source(lib: Any, grammar: GrammarText) -> str:
    """Return a grammar in the library's own form."""
    make = lib.LLMatcher
    try:
        if grammar.kind == "json_schema":
            return str(make.grammar_from_json_schema(grammar.text, defaults=SEPARATORS))
        if grammar.kind == "regex":
            return str(make.grammar_from_regex(grammar.text))
        return str(make.grammar_from_lark(grammar.text))
    except ValueError as error:
        raise RequestError(f"structured.{grammar.kind}: {error!s:.300}") from error


def _vocabulary(
    lib: Any, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]
) -> Any:
    """Return the vocabulary in the library's own form.

    Without end tokens, one behind the vocabulary stands for the end.
    """
    ends = list(end_ids) or [vocab]
    size = vocab if end_ids else vocab + 1
    wrapped = lib.TokenizerWrapper(Vocabulary(tokenizer, size, ends[0]))
    return lib.LLTokenizer(wrapped, n_vocab=size, eos_token=ends)


def library() -> Any:
    """Import ``llguidance``, or raise :class:`MissingPackage` with the install line."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingPackage(
            "llguidance, which compiles grammars, is not installed. "
            "Try: pip install 'inl-core[guidance]'"
        ) from error
    return llguidance
