"""A tiny Llama on the device under test, and what float64 says of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.config import EngineConfig
from inl.dtypes import rounded
from inl.executor.model_loader import LanguageModel, start_runner
from inl.models.llama import MODEL
from inl.protocol.runner import Limits
from inl.testing.check import Measure, require
from inl.testing.gap import BOUNDS
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama

if TYPE_CHECKING:
    from inl.executor.local_runner import LocalRunner
    from inl.testing.target import Target

VOCAB = 256
"""Bytes are tokens, so that a text has ids without a vocabulary's file."""


class Tiny:
    """A random Llama in one dtype of the target, and its oracle.

    The oracle computes each text alone, uncached, in float64, and is written apart
    from ops, models and kernels (:func:`~inl.testing.tiny.plain_logits`).
    """

    def __init__(self, target: Target, dtype: str) -> None:
        self.target, self.dtype = target, dtype
        hf, tensors = tiny_llama(
            target.rng("tiny"), hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96,
            vocab=VOCAB,
        )  # fmt: skip
        self.hf = hf
        self.tensors = {name: rounded(x, dtype) for name, x in tensors.items()}

    @cached_property
    def language(self) -> LanguageModel:
        """The model as an engine opens it."""
        checkpoint = MemoryCheckpoint(self.hf, self.tensors)
        return LanguageModel(MODEL, MODEL.config(self.hf), checkpoint)

    def limits(self, **changes: Any) -> Limits:
        """Room for six sequences of 64 tokens, in blocks as the backend likes them."""
        traits = self.target.backend.traits
        width = -(-64 // traits.block_size)
        given: dict[str, Any] = {
            "slots": 7,
            "blocks": (6 * width + 2,),
            "block_size": traits.block_size,
            "max_blocks_per_seq": width,
            "vocab": VOCAB,
            "depth": max(traits.depth, 2),
        }
        return Limits(**{**given, **changes})

    def runner(self, **changes: Any) -> LocalRunner:
        """A fresh runner of the backend, its kernels chosen as an engine does."""
        config = EngineConfig(backend=self.target.device, dtype=self.dtype)
        limits = self.limits(**changes)
        return start_runner(self.language, self.target.backend, config, limits=limits)

    def logits(self, ids: Sequence[int]) -> Any:
        """Float64 logits [len(ids), V]."""
        return plain_logits(self.hf, self.tensors, list(ids))

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Measure:
        """Whether each token of a greedy answer is the likeliest, given those before.

        Where it is not, it must lie so close below that the dtype cannot tell.
        """
        logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(answer)), list(answer)]
        behind = logits.max(-1) - chosen
        place, bound = int(behind.argmax()), BOUNDS[self.dtype]
        measure = Measure(float(behind[place]), bound)
        require(
            measure.error < bound,
            f"{self.target.device} in {self.dtype}: token {place} of the answer to "
            f"{len(prompt)} tokens is {answer[place]}, the oracle's is "
            f"{int(logits[place].argmax())}, {behind[place]:.3g} ahead; the dtype may "
            f"differ by {bound:g}; seed {self.target.seed}",
            measure,
        )
        return measure

    def expected_error(self, ids: Sequence[int]) -> float:
        """How far NumPy itself is from float64 when it stores in this dtype."""
        from inl.backend.reference import ReferenceBackend
        from inl.device import Device

        backend = ReferenceBackend(Device("reference"), dtype=self.dtype)
        config = EngineConfig(backend="reference", dtype=self.dtype)
        runner = start_runner(self.language, backend, config, limits=self.limits())
        found = prompt_logits(runner, ids)
        runner.close()
        return float(np.abs(found - self.logits(ids)[-1]).max())


def prompt_logits(runner: LocalRunner, ids: Sequence[int]) -> Any:
    """Logits [V] after a prompt that is computed in one step."""
    from inl.dtypes import widen
    from inl.testing.play import admission, one_step

    blocks = list(range(1, 1 + -(-len(ids) // runner.limits.block_size)))
    runner.submit(admission(runner.limits, 1, blocks))
    frame = one_step(runner.limits, [(1, list(ids))], step=1, decoding=0)
    return widen(runner.logits(frame))[0].astype(np.float64)


def tinies(target: Target) -> list[Tiny]:
    """One in each dtype that the backend computes in."""
    return [Tiny(target, dtype) for dtype in target.dtypes]
