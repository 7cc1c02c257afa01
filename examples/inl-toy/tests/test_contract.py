"""The conformance tests that ``inl check toy:0`` runs."""

from inl.testing import Conformance


class TestBackend(Conformance):
    device = "toy:0"
