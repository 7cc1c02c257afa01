"""A grammar over token ids, as a pure function of the output, and its guide."""

from __future__ import annotations

from random import Random

import numpy as np

from inl.errors import RequestError
from inl.protocol.token_masks import mask_words


class ToyGrammar:
    """Allows one to nine tokens after each output; one in two places allow only one.

    counts: numbers of allowed tokens, one of which is chosen for each place.
    """

    def __init__(self, seed, vocab, ends, counts=(1, 1, 2, 9)):
        self.seed, self.vocab, self.ends = seed, vocab, sorted(ends)
        self.counts = counts
        self.known = {}
        self.length = Random(f"{seed} length").randint(1, 30)

    def allowed(self, output):
        """The tokens that may follow ``output``, in order."""
        key = tuple(output)
        if key not in self.known:
            self.known[key] = self.draw(output)
        return self.known[key]

    def draw(self, output):
        random = Random(f"{self.seed} {output}")
        others = [each for each in range(min(self.vocab, 999)) if each not in self.ends]
        count = random.choice(self.counts)
        tokens = {random.choice(others) for _ in range(count)}
        if random.random() < 0.1:
            tokens |= set(self.ends)
        return sorted(tokens)

    def is_complete(self, output):
        return len(output) >= self.length


class ToyGuide:
    """A guide of a toy grammar; refuses tokens that the grammar does not allow."""

    def __init__(self, grammar):
        self.grammar = grammar
        self.restart()

    def restart(self):
        self.output = []

    def copy(self):
        return type(self)(self.grammar)

    @property
    def is_complete(self):
        return self.grammar.is_complete(self.output)

    @property
    def forced(self):
        output = list(self.output)
        while not self.grammar.is_complete(output) and len(output) < 60:
            allowed = self.grammar.allowed(output)
            if len(allowed) > 1 or allowed[0] in self.grammar.ends:
                break
            output += allowed
        return output[len(self.output) :]

    def advance(self, token):
        if token not in self.grammar.allowed(self.output) or self.is_complete:
            raise RequestError(f"grammar: {token} may not follow {self.output}")
        self.output.append(token)

    def accepts(self, drafts):
        return len(self.masks(drafts)) - 1

    def masks(self, drafts=()):
        output, masks = list(self.output), []
        for draft in (*drafts, None):
            allowed = self.grammar.allowed(output)
            masks.append(mask_words(allowed, self.grammar.vocab))
            output.append(draft)
            ends = draft in self.grammar.ends or self.grammar.is_complete(output)
            if draft not in allowed or ends:
                break
        return np.stack(masks)
