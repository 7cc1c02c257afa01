"""Prompts that begin alike go to the same engine, whichever server they reach.

An engine that is added or lost changes the choice of its own share of the prompts only.
"""

from array import array
from hashlib import blake2b

BEGINNING = 64
"""Tokens that must be equal."""
CROWD = 2
"""Open requests, by the engine's places, above which it gets no others."""


class Sticky:
    """Takes the engine with the largest hash of its address and the prompt's start."""

    def choose(self, prompt, replicas):
        start = array("i", prompt.tokens[:BEGINNING]).tobytes()
        free = [each for each in replicas if each.open < CROWD * each.places]
        if not free:
            return None  # the server's own router knows which is done first

        def weight(replica):
            return blake2b(start + replica.address.encode()).digest()

        return max(free, key=weight).number
