"""Compares the kernels of ``inl explain`` with those that a started runner computes."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

import inl.spec.dispatch
from eagle_heads import random_head, written
from inl.cli.explain import explain
from inl.cli.traced_step import explain_step
from inl.executor.load_plan import configure
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.spec.step import Bucket
from inl.speculation.draft_head import DraftExecutor, open_head
from inl.speculation.setup import head_place, with_draft_head
from inl.testing.play import admission, one_step
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

SIZES = ((1, 1), (3, 3), (5, 1), (20, 2))
"""Tokens and rows of steps."""

NOT_COMPUTED = ("mask_logits", "set_token_bias")
"""Ops that are bound for other frames than admissions and steps."""

TARGET = tiny_llama(
    np.random.default_rng(3), layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16,
    inner=96,
)  # fmt: skip


def language():
    """A tiny Llama whose matrices can be quantized."""
    files = MemoryCheckpoint(*TARGET)
    return LanguageModel(MODEL, MODEL.config(files.config), files)


def draft_head(folder):
    """The folder of a draft head of :func:`language`."""
    return written(folder, *random_head(np.random.default_rng(8), TARGET[0]))


@contextmanager
def recorded_kernels(monkeypatch):
    """Yield the labels of the kernels that ops bind, and of those that run."""
    bound, ran = set(), set()
    noting = inl.spec.dispatch.noting

    def recording(kernel):
        bound.add(kernel.label)
        run = noting(kernel)

        def call(*args, **attrs):
            ran.add(kernel.label)
            return run(*args, **attrs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(inl.spec.dispatch, "noting", recording)
        yield bound, ran


def labels(rows, *, without=()):
    """The kernels of the rows that ``inl explain`` prints."""
    native = [row for row in rows if row["how"] == "native"]
    assert all(row["sites"] for row in rows)
    return {row["winner"] for row in native if row["op"] not in without}


def explained(backend, config, tokens, rows):
    """Return the traced step that ``inl explain`` prints."""
    return explain_step(language(), backend, config, Bucket(tokens, rows))


def assert_explained(backend, config, monkeypatch, *, start=start_runner):
    """Each step that is explained binds and runs the kernels of a started runner.

    start: starts the runner, or a rank of several.
    """
    tapped = with_draft_head(configure(language(), config), config)
    for tokens, rows in SIZES:
        step = explained(backend, config, tokens, rows)
        with recorded_kernels(monkeypatch) as (bound, ran):
            runner = start(tapped, backend, config)
            bound.clear()
            runner.executor._ops.clear()
            compute(runner, tokens, rows)
        table = explain(step.tracer)
        assert labels(table) == bound, (tokens, rows)
        assert labels(table, without=NOT_COMPUTED) == ran, (tokens, rows)
        if step.draft_head is not None:
            assert_head_explained(runner, config, step.draft_head, monkeypatch)
        runner.close()


def assert_head_explained(runner, config, tracer, monkeypatch):
    """The draft head beside a runner binds the kernels that are explained."""
    head = open_head(config.draft_model, language())
    with recorded_kernels(monkeypatch) as (bound, _):
        place = head_place("target", config, runner.limits)
        executor = DraftExecutor(head, runner, **place)
        bound.clear()
        executor._ops.clear()
        executor.ops(tracer.bucket)
    assert labels(explain(tracer)) == bound
    executor.release()


def compute(runner, tokens, rows):
    """Compute a step of as many tokens of each row."""
    limits = runner.limits
    counts = [tokens // rows] * rows
    for slot in range(1, rows + 1):
        runner.submit(admission(limits, slot, [2 * slot - 1, 2 * slot]))
    parts = [(slot, [7] * count) for slot, count in enumerate(counts, start=1)]
    decoding = rows if tokens == rows else 0
    runner.submit(one_step(limits, parts, step=1, decoding=decoding))
    runner.collect()
