"""Hidden states in place of logits: a second runner on the weights of the first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from inl.errors import RequestError
from inl.executor.local_runner import LocalRunner

if TYPE_CHECKING:
    from inl.ops.protocol import Ops
    from inl.protocol.runner import Runner


class _WithoutHead:
    """The ops of a model's head, without its product with the vocabulary."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def norm_logits(
        self, residual: Any, delta: Any, samples: Any, norm: Any, _w: Any, *, eps: float
    ) -> Any:
        ops = self._ops
        residual = ops.take_rows(residual, samples)
        delta = ops.take_rows(delta, samples)
        return ops.reduce_add_norm(residual, delta, norm, eps=eps)[1]

    def linear(self, x: Any, _w: Any) -> Any:
        return x

    def soft_cap(self, x: Any, **_: Any) -> Any:
        return x

    def all_gather(self, x: Any, **_: Any) -> Any:
        return x


def hidden_head(head: Any, ops: Ops, *args: Any) -> Any:
    """Return the normalized hidden states [S, H] that a head multiplies."""
    return head(cast("Ops", _WithoutHead(ops)), *args)


def hidden_runner(runner: Runner, tokens: int) -> LocalRunner:
    """Return a runner whose ``logits`` are hidden states [S, H] of one sequence.

    It shares the weights of ``runner``, and has a cache of its own for ``tokens``
    tokens. Raises :class:`~inl.errors.RequestError` for a runner of another process,
    or of several devices.
    """
    if not isinstance(runner, LocalRunner) or runner.loaded.ranks != 1:
        raise RequestError(
            "embed: the weights are in other processes or on several devices; accepts "
            "an engine on one device of this process"
        )
    loaded, limits = runner.loaded, runner.limits
    count = -(-tokens // limits.block_size)
    model = replace(loaded.model, head=partial(hidden_head, loaded.model.head))
    return LocalRunner(
        runner.executor.backend,
        replace(loaded, model=model, taps=()),
        replace(
            limits,
            slots=2,
            blocks=(count + 1,) * limits.groups,
            max_blocks_per_seq=count,
            buckets=(),
            depth=1,
            sampler="greedy",
            decode_steps=1,
            max_drafts=0,
        ),
    )
