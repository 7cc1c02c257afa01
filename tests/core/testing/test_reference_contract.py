"""All conformance checks on the reference backend."""

from __future__ import annotations

from inl.testing import Conformance


class TestReference(Conformance):
    device = "reference:0"
