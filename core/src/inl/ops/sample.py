"""Choosing the next token. No randomness here: the host sends uniform numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from inl.ops.attention import random_step
from inl.ops.step import empty_tables
from inl.spec.op import Case, Spec, op
from inl.spec.values import Step, Tables


def _case(rng: np.random.Generator, sampler: str, vocab: int) -> Case:
    step, _ = random_step(rng, [3, 0, 5], [1, 4, 1], pad_rows=1)
    uniforms = np.array([0.1, 0.62, 0.9999, 0.5], np.float32)
    step = step._replace(uniforms=uniforms.view(np.int32))
    tables = empty_tables(groups=1, slots=4, width=step.blocks.shape[-1])
    tables.params[:, 0] = [0.0, 0.7, 0.0, 1.3]
    logits = 3 * rng.standard_normal((4, vocab))
    return Case(f"{sampler}/{vocab}", (logits, step, tables), {"sampler": sampler})


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for vocab in (5, 257):
        yield _case(rng, "greedy", vocab)
        yield _case(rng, "draw", vocab)
    ties = _case(rng, "greedy", 5)
    logits = np.array([[1, 2, 2, 0, 2.0]] * 4)
    yield Case("greedy/ties", (logits, *ties.args[1:]), ties.attrs)


def _shapes(_logits: Spec, step: Step, tables: Tables, **_: Any) -> tuple[Any, Any]:
    return Spec(step.samples.shape, "int32"), tables


@op(shapes=_shapes, cases=_cases, consumes=("tables",), rounds=False)
def choose(
    logits: Any, step: Step, tables: Tables, *, sampler: str
) -> tuple[Any, Tables]:
    """Pick one token per sample from ``logits`` [S, V], and remember each row's last.

    "greedy" takes the highest logit, ties to the lowest id. "draw" scales by the
    slot's temperature (0 is greedy) and takes the first id at which the cumulative
    probability exceeds the host's uniform number. Returns tokens int32 [S].
    """
    tokens = np.argmax(logits, axis=-1)
    if sampler == "draw":
        tokens = np.where(*_drawn(logits, step, tables), tokens)
    tokens = tokens.astype(np.int32)
    last = tables.last.copy()
    last[step.slots] = tokens.reshape(step.slots.shape[0], -1)[:, -1]
    return tokens, tables._replace(last=last)


def _drawn(logits: Any, step: Step, tables: Tables) -> tuple[Any, Any]:
    width = step.samples.shape[0] // step.slots.shape[0]
    temperature = np.repeat(tables.params[step.slots, 0], width)[:, None]
    hot = temperature > 0
    scaled = logits / np.where(hot, temperature, 1)
    mass = np.cumsum(np.exp(scaled - scaled.max(-1, keepdims=True)), axis=-1)
    uniform = step.uniforms.view(np.float32)[:, None]
    token = (mass <= uniform * mass[:, -1:]).sum(-1)
    return hot[:, 0], np.minimum(token, logits.shape[-1] - 1)


def _mask_cases(rng: np.random.Generator) -> Iterable[Case]:
    for vocab in (5, 64, 77):
        words = rng.integers(-(2**31), 2**31, (3, -(-vocab // 32))).astype(np.int32)
        yield Case(f"3x{vocab}", (rng.standard_normal((3, vocab)), words))


@op(
    shapes=lambda logits, masks: Spec(logits.shape, "float32"),  # noqa: ARG005
    cases=_mask_cases,
    rounds=False,
)
def mask_logits(logits: Any, masks: Any) -> Any:
    """Keep ``logits`` [S, V] where bit ``t % 32`` of ``masks[s, t // 32]`` is set.

    Elsewhere they become -1e30, so that a row with no token allowed is no NaN.
    The result is float32, which holds that.
    """
    index = np.arange(logits.shape[-1])
    allowed = (masks[:, index // 32] >> (index % 32).astype(np.int32)) & 1
    return np.where(allowed == 1, logits, np.float32(-1e30))
