"""The runner gives its state away: while a program runs, nothing else refers to it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.engine.core import EngineCore
from inl.errors import OutOfMemory, RunnerError
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama

LIMITS = Limits(
    slots=8, blocks=(30,), block_size=4, max_blocks_per_seq=12, vocab=96, depth=2
)
BUCKET = Bucket(1, 1)


class Counting:
    """A backend of a framework that counts references, and when its programs refuse.

    Kernels return new arrays, and a program waits for them only after it has dropped
    its arguments.
    """

    def __init__(self):
        self.alive, self.calls = [], 0
        self.refuses = self.loses = lambda _call: False
        make = simple_backend(
            tensor=lambda host: np.array(widen(host)), numpy=wrap,
            kernels=self.kernels, compile=self.compile,
            traits=Traits(dtypes=("float32",), block_size=4),
        )  # fmt: skip
        self.runner = local_runner(
            make(Device("counting:0")), MODEL, self.checkpoint(), LIMITS
        )

    @staticmethod
    def checkpoint():
        return MemoryCheckpoint(*tiny_llama(np.random.default_rng(3), kv_heads=4))

    def kernels(self):
        for op in catalog().values():
            if not op.composite:
                yield Kernel(op.name, "body", body_kernel(op, "float32"))

    def compile(self, function, bucket, consumes):
        (at,) = consumes

        def program(*args):
            self.calls += bucket is not None
            if bucket and self.refuses(self.calls):
                raise OutOfMemory("8 bytes do not fit")
            consumed = [weakref.ref(array) for array in leaves(args[at])]
            results = function(*args)
            del args
            if bucket and self.loses(self.calls):
                raise OutOfMemory("9 bytes do not fit")
            kept = {id(array) for array in leaves(results)}
            self.alive += [
                array.shape
                for ref in consumed
                if (array := ref()) is not None and id(array) not in kept
            ]
            return results

        return program


@pytest.fixture
def counting():
    made = Counting()
    yield made
    made.runner.close()


FIELDS = [
    {"prompt": [5, 6, 7], "max_tokens": 6},
    {"prompt": range(9), "max_tokens": 5, "temperature": 0.7, "seed": 2},
    {"prompt": [8, 9], "max_tokens": 4, "allowed_token_ids": range(30)},
    {"prompt": [1, 2], "max_tokens": 3, "logit_bias": {4: 3.0}},
]


def outputs(core):
    """Tokens of each request, or the type of its error."""
    requests = [Request(**fields) for fields in FIELDS]
    for request in requests:
        core.add(request)
    errors = {}
    while core.has_work:
        for event in core.step():
            if event.error is not None:
                errors[event.request] = type(event.error)
    return [errors.get(each.id, each.output_ids) for each in requests]


def test_a_running_program_holds_the_only_reference(counting):
    """Of every program: admissions, token biases, steps and masked steps."""
    outputs(EngineCore(counting.runner))
    names = {name for name, _ in counting.runner.executor.program_keys}
    assert names == {"advance", "logits", "masked", "set_token_bias"}
    assert counting.calls > 5
    assert counting.alive == []


def test_requests_go_on_after_a_program_without_memory(counting):
    pairs = SchedulerConfig(max_rows=2)
    expected = outputs(EngineCore(counting.runner, pairs))
    counting.runner.reset()
    first = counting.calls
    counting.refuses = lambda call: call == first + 2
    found = outputs(EngineCore(counting.runner, pairs))
    assert found == [OutOfMemory, OutOfMemory, *expected[2:]]
    assert counting.alive == []


def test_an_error_that_is_kept_does_not_keep_the_state(counting):
    executor = counting.runner.executor
    counting.refuses = lambda _: True
    before = [weakref.ref(array) for array in leaves(executor.state.caches)]
    with pytest.raises(OutOfMemory) as caught:
        executor.advance(BUCKET, executor.dummy_message(BUCKET))
    assert all(ref() is not None for ref in before)
    counting.refuses = lambda _: False
    executor.advance(BUCKET, executor.dummy_message(BUCKET))
    gc.collect()
    assert str(caught.value) == "8 bytes do not fit"
    assert all(ref() is None for ref in before)
    assert counting.alive == []


def test_a_state_that_was_consumed_before_the_error_is_lost(counting):
    """The runner says so, refuses to compute, and goes on after a reset."""
    executor = counting.runner.executor
    counting.loses = lambda _: True
    with pytest.raises(RunnerError, match=r"consumed its state.*9 bytes"):
        executor.advance(BUCKET, executor.dummy_message(BUCKET))
    counting.loses = lambda _: False
    with pytest.raises(RunnerError, match="call reset first"):
        executor.advance(BUCKET, executor.dummy_message(BUCKET))
    counting.runner.reset()
    assert all(tokens for tokens in outputs(EngineCore(counting.runner)))
