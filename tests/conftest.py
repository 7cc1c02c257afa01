"""What tests of every tier share: measured gradients, and recorded INL models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plain_deep import PlainDeep

STEP = 1e-5


def _weighed(function, operands, weights):
    results = function(*operands)
    return sum(float(np.sum(w * r)) for w, r in zip(weights, results, strict=True))


def differences(function, operands, weights):
    """Gradients of ``sum(weights * function(*operands))``: central differences.

    Of the fourth order, in float64: with steps of 1e-5 they are good to about 1e-10.
    """
    found = []
    for place, operand in enumerate(operands):
        gradient = np.zeros(np.shape(operand))
        for index in np.ndindex(gradient.shape):
            values = []
            for steps in (-2, -1, 1, 2):
                moved = np.array(operand, np.float64)
                moved[index] += steps * STEP
                changed = (*operands[:place], moved, *operands[place + 1 :])
                values.append(_weighed(function, changed, weights))
            a, b, c, d = values
            gradient[index] = (a - 8 * b + 8 * c - d) / (12 * STEP)
        found.append(gradient)
    return found


@pytest.fixture(scope="session")
def measured_gradients():
    return differences


FORMS = {
    "full": ((2, 3, 4),) * 6,
    "one for all": ((2, 3, 4), (2, 3, 4), (4,), (4,), (4,), (4,)),
    "leading ones": ((2, 3, 4), (2, 3, 4), (1, 4), (1, 1, 4), (2, 1, 4), (1, 3, 1)),
    "per token": ((2, 3, 4), (1, 3, 4), (2, 3, 1), (3, 1), (2, 1, 1), (2, 3, 1)),
    "scalars": ((2, 3, 4), (), (), (), (), ()),
    "vectors": ((5,), (5,), (1,), (5,), (), (5,)),
}
"""Shapes of x, v, mu, alpha, beta, gate."""


@pytest.fixture(params=FORMS)
def dynamics_operands(request):
    """x, v, mu, alpha, beta, gate, dt in float64, and weights of the two results."""
    rng = np.random.default_rng(sorted(FORMS).index(request.param))
    shapes = FORMS[request.param]
    operands = [np.asarray(rng.standard_normal(shape)) for shape in shapes]
    return (*operands, np.asarray(0.3)), rng.standard_normal((2, *shapes[0]))


CONTROLLED = {
    "one step": (1, None, None, ()),
    "shared controller": (1, None, None, (1,)),
    "clamped": (1, 0.7, 0.6, ()),
    "three steps": (3, None, None, ()),
    "three steps, clamped": (3, 0.7, 0.6, (2,)),
    "no step": (0, None, None, ()),
}


@pytest.fixture(params=CONTROLLED)
def controlled_operands(request):
    """x, v, mu, controller, dt; weights of the results; attributes of the op."""
    n_steps, most_beta, limit, lead = CONTROLLED[request.param]
    rng = np.random.default_rng(7)
    x, v = rng.standard_normal((2, 2, 5))
    controller = rng.standard_normal((*(lead or (2,)), 15))
    operands = x, v, rng.standard_normal(5), controller, np.asarray(0.2)
    attrs = {"n_steps": n_steps, "most_beta": most_beta, "limit": limit}
    return operands, rng.standard_normal((2, 2, 5)), attrs


@pytest.fixture(params=["moving mu", "still mu"])
def block_operands(request):
    """h, velocity, dt and the weights of a block in float64; weights of its results.

    Some betas and velocities lie beyond their clamps, none close to them.
    """
    rng = np.random.default_rng(4)
    hidden, inner = 4, 3
    h, velocity = rng.standard_normal((2, 2, hidden))
    shapes = (hidden,), (inner, 2 * hidden), (inner,), (3 * hidden, inner), (12,)
    mu, *rest = (rng.standard_normal(shape) for shape in shapes)
    w = [np.array([30.0, 0.3, -30.0, 1.0]) + mu, *(2 * each for each in rest)]
    if request.param == "moving mu":
        w.append(rng.standard_normal((hidden, hidden)))
    return (h, velocity, np.asarray(0.2), *w), rng.standard_normal((3, 2, hidden))


DATA = Path(__file__).parent / "data"


class Recorded:
    """A model of tests/data on a device, fed by hand, and what is known of it."""

    def __init__(self, version, device, *, language=None, kernels=None, **config):
        """device: the name of one, or a backend."""
        from inl.executor.model_loader import open_model
        from inl.plugin import make_backend

        self.language = language or open_model(DATA / version)
        if config:
            changed = replace(self.language.config, **config)
            self.language = replace(self.language, config=changed)
        named = isinstance(device, str)
        self.backend = make_backend(device) if named else device
        self.kernels = kernels
        expected = np.load(DATA / version / "expected.npz")
        self.prompts = [expected[f"prompt{i}"].tolist() for i in range(4)]
        self.logits = [expected[f"logits{i}"] for i in range(4)]
        self.greedy = [expected[f"greedy{i}"].tolist() for i in range(4)]

    def runner(self, *, blocks=60, block_size=8):
        from inl.executor.local_runner import Loaded, LocalRunner
        from inl.spec.limits import Limits
        from inl.spec.selection import KernelSelection
        from inl.weights.loader import load_weights, stored_specs
        from inl.weights.plan import plan_weights

        model, checkpoint = self.language.model, self.language.checkpoint
        shaped = replace(self.language.config, dtype="float32")
        kernels = tuple(self.backend.kernels())
        if self.kernels:
            kernels = tuple(map(self.kernels, kernels))
        groups = plan_weights(model.weights(shaped), kernels, stored_specs(checkpoint))
        weights = load_weights(groups, checkpoint, self.backend, "float32")
        loaded = Loaded(model, shaped, groups, weights, KernelSelection(kernels))
        limits = Limits(
            slots=6, blocks=(blocks,), block_size=block_size, max_blocks_per_seq=16,
            vocab=self.language.config.vocab_size,
        )  # fmt: skip
        return Fed(LocalRunner(self.backend, loaded, limits))

    def core(self, **limits):
        """An engine without text."""
        from inl.engine.core import EngineCore
        from inl.executor.model_loader import is_replayed
        from inl.scheduling.plan import SchedulerConfig

        runner = self.runner(**limits).runner
        return EngineCore(runner, SchedulerConfig(replay=is_replayed(self.language)))


class Fed:
    """A runner of which each call is one step, and gives its tokens' logits."""

    def __init__(self, runner):
        self.runner, self.steps, self.cached = runner, 0, {}

    def admit(self, slot):
        from inl.spec.message import admit_frame

        limits = self.runner.limits
        # Scattered, and apart from those of other slots.
        blocks = [slot + 5 * place for place in range(limits.blocks[0] // 5 - 1)]
        self.runner.submit(
            admit_frame(
                slot,
                [blocks[: limits.max_blocks_per_seq]],
                groups=1,
                max_blocks_per_seq=limits.max_blocks_per_seq,
            )
        )

    def __call__(self, *rows, decoding=0, pads=(0, 0)):
        """rows: (slot, ids), decoding ones first. Returns [ids, V] of each row."""
        from inl.dtypes import widen
        from inl.spec.message import Row, step_frame
        from inl.spec.step import Bucket

        self.steps += 1
        counts = [len(ids) for _, ids in rows]
        width = max(counts)
        bucket = Bucket(sum(counts) + pads[0], len(rows) + pads[1], width)
        frame = step_frame(
            bucket,
            [Row(slot, ids) for slot, ids in rows],
            step=self.steps,
            groups=1,
            block_size=self.runner.limits.block_size,
            decode_rows=decoding,
        )
        found = widen(self.runner.logits(frame)).reshape(len(rows) + pads[1], width, -1)
        return [found[row, width - count :] for row, count in enumerate(counts)]


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
    from inl.dtypes import widen
    from inl.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(DATA / "inl-v013")
    names = checkpoint.names()
    return dict(checkpoint.config), {n: widen(checkpoint.tensor(n)) for n in names}
