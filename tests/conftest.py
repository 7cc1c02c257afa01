"""Fixtures of every test folder: depth, signals, gradients, recorded INL models."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import gradients
from depth import scaled
from plain_deep import PlainDeep
from recorded_models import DATA, Recorded

try:
    import resource
except ImportError:  # Windows
    resource = None

pytest_plugins = ["depth_hooks"]


@pytest.fixture(scope="session")
def depth():
    """Function of two values: returns the first at quick depth, the second at full.

    A test that takes this fixture is marked ``scaled``.
    """
    return scaled


@pytest.fixture(scope="session", autouse=True)
def default_interrupt():
    """Handle SIGINT as an interactive shell's child does.

    A process that a script starts in the background ignores SIGINT, and so do its
    children, but tests send it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def limits():
    """Limits of address space and processor time; ``None`` on Windows."""
    if resource is None:
        return None
    names = resource.RLIMIT_AS, resource.RLIMIT_CPU
    return [resource.getrlimit(name) for name in names]


@pytest.fixture(autouse=True)
def unchanged_limits():
    """Fail a test that limits the process that runs the tests after it."""
    before = limits()
    yield
    assert limits() == before


@pytest.fixture(scope="session")
def measured_gradients():
    """:func:`gradients.finite_differences`."""
    return gradients.finite_differences


@pytest.fixture(params=gradients.FORMS)
def dynamics_operands(request):
    return gradients.dynamics(request.param)


@pytest.fixture(params=gradients.CONTROLLED)
def controlled_operands(request):
    return gradients.controlled(request.param)


@pytest.fixture(params=gradients.BLOCKS)
def block_operands(request):
    return gradients.block(request.param)


@pytest.fixture(scope="session")
def recorded():
    """Makes :class:`Recorded` models."""
    return Recorded


@pytest.fixture(scope="session")
def apart():
    """The largest relative difference of rows of logits."""

    def measure(found, want):
        size = np.abs(want).max(-1)
        return float((np.abs(found - want).max(-1) / size).max())

    return measure


@pytest.fixture(scope="session")
def answered():
    """Answers to prompts by an engine without text: lists of tokens."""

    def run(core, prompts, count, **options):
        from inl.scheduling.request import Request

        requests = [Request(ids, max_tokens=count, **options) for ids in prompts]
        for request in requests:
            core.add(request)
        while core.has_work:
            core.step()
        return [request.output_ids for request in requests]

    return run


@pytest.fixture(scope="session")
def plain_deep():
    """The class :class:`plain_deep.PlainDeep`."""
    return PlainDeep


@pytest.fixture(scope="session")
def deep_made():
    """Config and tensors of the recorded 0.13 model, as NumPy arrays by name."""
    from inl.checkpoints.checkpoint import open_checkpoint
    from inl.dtypes import widen

    checkpoint = open_checkpoint(DATA / "inl-v013")
    names = checkpoint.names()
    return dict(checkpoint.config), {n: widen(checkpoint.tensor(n)) for n in names}
