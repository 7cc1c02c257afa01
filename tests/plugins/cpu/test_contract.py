"""The backend contract, which ``inl check cpu:0`` runs too."""

from __future__ import annotations

from inl.testing import Conformance


class TestCpu(Conformance):
    device = "cpu:0"
