"""Counts of accepted and refused inputs, for tests with damaged or random input."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager


class Outcomes(Counter):
    """Counts of inputs; a test that never sees one of both outcomes proves nothing."""

    @contextmanager
    def refused_by(self, *errors):
        """Count the block as refused if it raises one of ``errors``, else accepted."""
        try:
            yield
        except errors:
            self["refused"] += 1
        else:
            self["accepted"] += 1

    def check(self):
        assert self["accepted"] > 0, dict(self)
        assert self["refused"] > 0, dict(self)
