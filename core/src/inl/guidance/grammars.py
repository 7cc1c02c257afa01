"""Compiles structured outputs to guides, with the package ``llguidance``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.errors import MissingPackage, RequestError
from inl.forks import on_fork
from inl.guidance.c_heap import return_free_memory
from inl.guidance.compiler import compile_matcher
from inl.guidance.deep_stack import DeepStack
from inl.guidance.guide_after_text import FreeText, GuideAfterText
from inl.guidance.json_schemas import checked_schema
from inl.guidance.matcher_guide import MatcherGuide
from inl.guidance.structural_tags import tag_grammar
from inl.guidance.structured import GrammarText, read_structured
from inl.guidance.trial_process import STACK
from inl.guidance.trials import GrammarTrials, Trial
from inl.guidance.vocabulary import Vocabulary, text_bytes
from inl.install_command import install_command

if TYPE_CHECKING:
    from inl.scheduling.guide import Guide
    from inl.text.tokenizer import Tokenizer

MAX_CACHED: Final = 64
"""Compiled grammars kept for requests with the same one."""

MAX_CACHED_SECONDS: Final = 0.5
"""Processor time of their compilation, all together: memory is taken in this time."""

MAX_CACHED_BYTES: Final = 32 << 20
"""Bytes of all together, where they are known; a schema of a tool takes some 100 kB."""

LARGE_BYTES: Final = 1 << 20
"""Size of a grammar whose compilation leaves free memory that is worth returning."""

NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
"""Behind a client's grammar, where it overrides its own options: ``/a+/ "a"`` forces an
endless text in a terminal, which no limit of the library ends."""

MAX_MARKS: Final = 4
"""Marks of ``after`` for which the tokens of the vocabulary are kept."""

MAX_PASSED: Final = 4_096
"""Grammars whose trial is not repeated."""


_stack = DeepStack(2 * STACK)
"""What did not overflow the stack of the child cannot overflow this one."""


class _Compiled(NamedTuple):
    guide: MatcherGuide
    seconds: float
    """Processor time of its trial."""
    bytes: int
    """What it took after its trial; its use adds to it."""


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
        self._library: _Library | None = None
        self.after_fork_in_child()
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Drop what is compiled: a thread of the parent may hold a lock of it."""
        if self._library is not None:
            self._library.trials.after_fork_in_child()
        self._compiled: dict[bytes, _Compiled] = {}
        self._passed: dict[bytes, Trial] = {}
        self._library = None
        self._has_free_memory = False
        """Whether the C library keeps what a large grammar has taken."""
        self._free_texts: dict[bytes, FreeText] = {}
        self._lock = threading.Lock()

    def guide(self, structured: Any) -> Guide:
        """Return a guide for a ``structured`` option.

        A grammar is compiled in a child process first, see
        :mod:`inl.guidance.trials`. Raises :class:`~inl.errors.RequestError` for one
        that cannot be compiled, and :class:`~inl.errors.MissingPackage`.
        """
        grammar = read_structured(structured, self._max_bytes)
        text = f"{grammar.kind}\n{grammar.text}"
        key = sha256(text.encode()).digest()
        # No lock, which an exception may leave locked: threads may compile twice.
        found = self._compiled.get(key)
        if found is None:
            found = self._compile(grammar, key)
            self._keep(key, found)
        guide = found.guide.copy()
        if not grammar.after:
            return guide
        return GuideAfterText(self._free_text(grammar.after.encode()), guide)

    def close(self) -> None:
        """End the child process; a later grammar starts another."""
        if self._library is not None:
            self._library.trials.close()

    def _free_text(self, mark: bytes) -> FreeText:
        text = self._free_texts.get(mark)
        if text is None:
            tokens = text_bytes(self._tokenizer(), self._vocab)
            text = FreeText(mark, tokens, self._vocab, self._end_ids)
            if len(self._free_texts) >= MAX_MARKS:
                self._free_texts.clear()
            self._free_texts[mark] = text
        return text

    def _keep(self, key: bytes, new: _Compiled) -> None:
        """Keep a grammar, in place of the oldest ones as far as needed."""
        if new.bytes <= MAX_CACHED_BYTES:
            self._evict(new)
            self._compiled[key] = new
        self._has_free_memory = new.bytes >= LARGE_BYTES

    def _evict(self, new: _Compiled) -> None:
        """Drop the oldest grammars until there is room for a new one."""
        compiled = list(self._compiled.items())
        seconds = new.seconds + sum(each.seconds for _, each in compiled)
        size = new.bytes + sum(each.bytes for _, each in compiled)
        for at, (key, each) in enumerate(compiled):
            fits = seconds <= MAX_CACHED_SECONDS and size <= MAX_CACHED_BYTES
            if fits and len(compiled) - at < MAX_CACHED:
                return
            self._compiled.pop(key, None)
            seconds -= each.seconds
            size -= each.bytes

    def _compile(self, grammar: GrammarText, key: bytes) -> _Compiled:
        if self._has_free_memory:  # the request of that grammar may have ended too
            self._has_free_memory = False
            return_free_memory()
        where = f"structured.{grammar.kind}"
        kind, text = grammar.kind, _program(grammar, where)
        with self._lock:
            if self._library is None:
                self._library = _Library(self._tokenizer(), self._vocab, self._end_ids)
            lib = self._library
        if (trial := self._passed.get(key)) is None:
            trial = lib.trials.run(kind, text, where)
            if len(self._passed) >= MAX_PASSED:
                self._passed.clear()
            self._passed[key] = trial
        make = partial(self._make, lib.vocabulary, kind, text, where)
        return _Compiled(_stack.call(make), trial.seconds, trial.kept)

    def _make(self, vocabulary: Any, kind: str, text: str, where: str) -> MatcherGuide:
        try:
            matcher = compile_matcher(library(), vocabulary, kind, text)
        except ValueError as error:
            raise RequestError(f"{where}: {error!s:.300}") from error
        guide = MatcherGuide(matcher, where, self._vocab, self._end_ids)
        if not guide.masks().any():
            raise RequestError(f"{where}: allows no output of this vocabulary")
        return guide


class _Library:
    """The vocabulary in the form of ``llguidance``, and trials with it.

    Without end tokens, one behind the vocabulary stands for the end.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]
    ) -> None:
        package = library()
        ends = list(end_ids) or [vocab]
        size = vocab if end_ids else vocab + 1
        names = Vocabulary(tokenizer, size, ends)
        self.trials = GrammarTrials(names.tokens, names.special_token_ids, ends)
        self.vocabulary = names.compile(package)


def _program(grammar: GrammarText, where: str) -> str:
    """Return the text that the library compiles."""
    if grammar.kind == "json_schema":
        return checked_schema(grammar.text, where)
    if grammar.kind == "structural_tag":
        return tag_grammar(grammar.text, where)
    return grammar.text + (NO_FORCING if grammar.kind == "lark" else "")


def library() -> Any:
    """Import ``llguidance``, or raise :class:`MissingPackage` with the install line."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingPackage(
            "llguidance, which compiles grammars, is not installed. "
            f"Try: {install_command('inl-core[guidance]')}"
        ) from error
    return llguidance
