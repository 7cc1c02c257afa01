"""A tiny Llama on the device under test, and its float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.config import EngineConfig
from inl.dtypes import rounded
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.protocol.runner import Limits
from inl.runners.local_runner import start_runner
from inl.testing.check import Measure, require
from inl.testing.near_tie import BOUNDS
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama

if TYPE_CHECKING:
    from inl.runners.local_runner import LocalRunner
    from inl.testing.target import Target

VOCAB = 256
"""Tokens are bytes, so no vocabulary file is needed."""


class Tiny:
    """A random Llama in one dtype of the target, and its oracle.

    The oracle computes each sequence alone, without a cache, in float64. Its code is
    independent of ops, models and kernels (:func:`~inl.testing.tiny.plain_logits`).
    """

    def __init__(self, target: Target, dtype: str) -> None:
        self.target, self.dtype = target, dtype
        hf, tensors = tiny_llama(
            target.rng("tiny"), hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96,
            vocab=VOCAB,
        )  # fmt: skip
        self.hf = hf
        self.tensors = {name: rounded(x, dtype) for name, x in tensors.items()}
        self.idle: list[LocalRunner] = []
        """Runners of earlier checks: a new one would compile its programs again."""

    @cached_property
    def language(self) -> LanguageModel:
        """The model, as an engine opens it."""
        checkpoint = MemoryCheckpoint(self.hf, self.tensors)
        return LanguageModel(MODEL, MODEL.config(self.hf), checkpoint)

    def limits(self, **changes: Any) -> Limits:
        """Return limits for 6 sequences of 64 tokens; ``changes`` override fields."""
        traits = self.target.backend.traits
        max_blocks = -(-64 // traits.block_size)
        defaults: dict[str, Any] = {
            "slots": 7,
            "blocks": (6 * max_blocks + 2,),
            "block_size": traits.block_size,
            "max_blocks_per_seq": max_blocks,
            "vocab": VOCAB,
            "depth": max(traits.depth, 2),
        }
        return Limits(**{**defaults, **changes})

    def runner(
        self, *, invariant: bool = False, kv_dtype: str = "auto", **changes: Any
    ) -> LocalRunner:
        """Start a runner of the backend, with the kernels that an engine selects."""
        config = EngineConfig(
            backend=self.target.device, dtype=self.dtype, invariant=invariant,
            kv_dtype=kv_dtype,
        )  # fmt: skip
        limits = self.limits(**changes)
        return start_runner(self.language, self.target.backend, config, limits=limits)

    def logits(self, ids: Sequence[int]) -> Any:
        """Return the oracle's logits, float64 [len(ids), V]."""
        return plain_logits(self.hf, self.tensors, list(ids))

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Measure:
        """Require that each token of a greedy answer has the oracle's largest logit.

        A token within :data:`~inl.testing.near_tie.BOUNDS` of the largest logit is
        accepted. Returns the largest difference; raises :class:`CheckFailed`.
        """
        logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(answer)), list(answer)]
        gaps = logits.max(-1) - chosen
        index, bound = int(gaps.argmax()), BOUNDS[self.dtype]
        measure = Measure(float(gaps[index]), bound)
        require(
            measure.error < bound,
            f"{self.target.device} in {self.dtype}: token {index} of the answer to "
            f"{len(prompt)} tokens is {answer[index]}, expected "
            f"{int(logits[index].argmax())}; logit gap {gaps[index]:.3g}, accepted: "
            f"below {bound:g}; seed {self.target.seed}",
            measure,
        )
        return measure

    def expected_error(self, ids: Sequence[int]) -> float:
        """Return the largest error of the NumPy reference backend in this dtype."""
        from inl.backend.reference import ReferenceBackend
        from inl.device import Device

        backend = ReferenceBackend(Device("reference"), dtype=self.dtype)
        config = EngineConfig(backend="reference", dtype=self.dtype)
        runner = start_runner(self.language, backend, config, limits=self.limits())
        logits = prompt_logits(runner, ids)
        runner.close()
        return float(np.abs(logits - self.logits(ids)[-1]).max())


def prompt_logits(runner: LocalRunner, ids: Sequence[int]) -> Any:
    """Return the logits [V] after a prompt, computed in one step."""
    from inl.dtypes import widen
    from inl.testing.play import admission, one_step

    blocks = list(range(1, 1 + -(-len(ids) // runner.limits.block_size)))
    runner.submit(admission(runner.limits, 1, blocks))
    frame = one_step(runner.limits, [(1, list(ids))], step=1, decoding=0)
    return widen(runner.logits(frame))[0].astype(np.float64)


def tinies(target: Target) -> list[Tiny]:
    """Return a tiny model for each compute dtype of the backend."""
    return [Tiny(target, dtype) for dtype in target.dtypes]
