"""Predicts that an answer goes on as a text of the corpus did after the same tokens."""

from pathlib import Path

from inl.errors import RequestError

MATCHED = 3
"""Tokens that must be equal."""


class Corpus:
    """Searches the tokens of a file for the last ones of each sequence."""

    def __init__(self, target):
        if target.draft_model is None or target.tokenizer is None:
            raise RequestError(
                "corpus: found no text or no tokenizer; accepted: a file of texts in "
                "draft_model, and a model with a tokenizer"
            )
        text = Path(target.draft_model).read_text("utf-8")
        self._tokens = target.tokenizer.encode(text)
        self._after = {}
        for end in range(MATCHED, len(self._tokens)):
            self._after.setdefault(tuple(self._tokens[end - MATCHED : end]), end)

    def propose(self, queries):
        return [self._next(query.tokens, query.limit) for query in queries]

    def _next(self, tokens, limit):
        start = self._after.get(tuple(tokens[-MATCHED:]))
        return [] if start is None else self._tokens[start : start + limit]

    def forget(self, request):
        """Nothing is kept of a request."""

    def close(self):
        self._after.clear()
