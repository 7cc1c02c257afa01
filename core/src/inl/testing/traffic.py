"""Random frames for runners: sequences that are admitted, computed and released."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.spec.limits import Limits
from inl.spec.message import (
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    release_frame,
    step_frame,
    token_bias_frame,
)
from inl.spec.step import SAMPLERS, Bucket

if TYPE_CHECKING:
    from inl.protocol.runner import Runner
    from inl.spec.message import IntArray


class Sent(NamedTuple):
    """A frame, and the sequences whose tokens its reply holds."""

    message: IntArray
    takes: tuple[int, ...] | None
    """Sequence of each row, -1 for an unfinished prompt; ``None`` unless a step."""
    tokens: int = 0
    """Tokens in use; 0 unless a step."""
    decoding: int = 0
    """Decoding rows, which feed their last token back."""


@dataclass(slots=True)
class _Sequence:
    name: int
    slot: int
    prompt: list[int]
    answer: int
    """Tokens still to be sampled."""
    cached: int = 0
    table: list[list[int]] = field(default_factory=list)


class Traffic:
    """Random frames: admissions in scattered blocks, chunked prompts mixed with
    decoding rows, slots and blocks reused immediately.

    The frames do not depend on replies, so that different runners can be compared on
    the same ones. ``prompts`` receives the prompt of each sequence, in order.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        limits: Limits,
        *,
        max_rows: int = 6,
        max_tokens: int = 24,
        longest: int = 40,
        sampler: str = "greedy",
    ) -> None:
        self.prompts: list[list[int]] = []
        self._rng, self._limits, self._sampler = rng, limits, sampler
        fits = [
            b for b in limits.buckets if b.sampler == sampler and b.reply_width == 1
        ]
        self._buckets = sorted(fits)
        self._max_rows = min([max_rows, *(max(b.rows for b in fits) for _ in fits[:1])])
        top = [b.tokens for b in fits if b.rows >= self._max_rows]
        self._max_tokens = min(max_tokens, max(top, default=max_tokens))
        self._longest = min(longest, limits.max_tokens)
        self._slots = list(range(1, limits.slots))
        self._free = [
            [int(b) for b in rng.permutation(np.arange(1, count))]
            for count in limits.blocks
        ]
        self._live: list[_Sequence] = []

    def frames(self, steps: int) -> Iterator[Sent]:
        """Yield frames up to the last of ``steps`` steps."""
        for step in range(1, steps + 1):
            while self._slots and (not self._live or self._rng.random() < 0.5):
                if not self._has_room():
                    break
                yield from self._admit()
            yield self._step(step)
            for sequence in [s for s in self._live if s.answer == 0]:
                yield self._release(sequence)

    def _has_room(self) -> bool:
        need = len(self._live) + 1
        per_sequence = -(-self._longest // self._limits.block_size)
        most = min(count - 1 for count in self._limits.blocks)
        return need <= self._max_rows and need * per_sequence <= most

    def _admit(self) -> Iterator[Sent]:
        rng, limits = self._rng, self._limits
        length = int(rng.integers(1, self._longest // 2 + 1))
        answer = int(rng.integers(1, self._longest // 2 + 1))
        prompt = [int(token) for token in rng.integers(0, limits.vocab, length)]
        sequence = _Sequence(len(self.prompts), self._slots.pop(0), prompt, answer)
        given = int(rng.integers(0, -(-length // limits.block_size) + 1))
        sequence.table = [[free.pop() for _ in range(given)] for free in self._free]
        self.prompts.append(prompt)
        self._live.append(sequence)
        hot = 0.8 if self._sampler != SAMPLERS[0] and rng.random() < 0.7 else 0.0
        params = self._params() if self._sampler == "sample_filtered" else {}
        frame = admit_frame(
            sequence.slot, sequence.table, groups=limits.groups,
            max_blocks_per_seq=limits.max_blocks_per_seq, temperature=hot, **params,
        )  # fmt: skip
        yield Sent(frame, None)
        if params:
            biased = {int(token) for token in rng.integers(0, limits.vocab, 3)}
            biases = [
                TokenBias(token, int(token in prompt), float(rng.normal()))
                for token in sorted({*prompt, *biased})
            ]
            yield Sent(token_bias_frame(sequence.slot, biases), None)

    def _params(self) -> Any:
        """Return random parameters that only "sample_filtered" programs serve."""
        values = {
            "top_k": (0, 1, 9),
            "top_p": (1.0, 0.7),
            "min_p": (0.0, 0.1),
            "repetition_penalty": (1.0, 1.5),
            "presence_penalty": (0.0, -1.0),
            "frequency_penalty": (0.0, 0.6),
        }
        return {name: float(self._rng.choice(some)) for name, some in values.items()}

    def _release(self, sequence: _Sequence) -> Sent:
        self._live.remove(sequence)
        self._slots.append(sequence.slot)
        for free, table in zip(self._free, sequence.table, strict=True):
            free[:0] = table
        limits = self._limits
        frame = release_frame(
            sequence.slot,
            groups=limits.groups,
            max_blocks_per_seq=limits.max_blocks_per_seq,
        )
        return Sent(frame, None)

    def _step(self, step: int) -> Sent:
        decoding = [s for s in self._live if s.cached >= len(s.prompt)]
        waiting = [s for s in self._live if s.cached < len(s.prompt)]
        rows: list[Row] = []
        takes: list[int] = []
        updates: list[BlockTableUpdate] = []
        budget = self._max_tokens
        for sequence in (*decoding, *waiting):
            left = len(sequence.prompt) - sequence.cached
            most = 1 if left <= 0 else min(left, budget, 1 + int(self._rng.poisson(5)))
            if most < 1:
                continue
            updates += self._grow(sequence, sequence.cached + most)
            at = sequence.cached
            tokens = [-1] if left <= 0 else sequence.prompt[at : at + most]
            rows.append(Row(sequence.slot, tokens, [float(self._rng.random())]))
            sequence.cached += most
            budget -= most
            sampled = sequence.cached >= len(sequence.prompt)
            sequence.answer -= sampled
            takes.append(sequence.name if sampled else -1)
        used = sum(len(row.tokens) for row in rows)
        message = step_frame(
            self._bucket(used, len(rows)), rows, updates, step=step,
            groups=self._limits.groups, block_size=self._limits.block_size,
            decode_rows=len(decoding),
        )  # fmt: skip
        return Sent(message, tuple(takes), used, len(decoding))

    def _grow(self, sequence: _Sequence, length: int) -> Iterator[BlockTableUpdate]:
        need = -(-length // self._limits.block_size)
        for group, table in enumerate(sequence.table):
            while len(table) < need:
                table.append(self._free[group].pop())
                yield BlockTableUpdate(group, sequence.slot, len(table) - 1, table[-1])

    def _bucket(self, tokens: int, rows: int) -> Bucket:
        if not self._buckets:
            extra, more = (int(n) for n in self._rng.integers(0, 3, 2))
            return Bucket(
                tokens=tokens + extra, rows=rows + more, sampler=self._sampler
            )
        fits = [b for b in self._buckets if b.tokens >= tokens and b.rows >= rows]
        return fits[min(len(fits) - 1, int(self._rng.random() < 0.2))]


def play(runner: Runner, frames: Iterator[Sent]) -> dict[int, list[int]]:
    """Run frames at the runner's depth; returns the tokens of each sequence."""
    texts: dict[int, list[int]] = {}
    in_flight: deque[tuple[int, ...]] = deque()

    def collect() -> None:
        takes = in_flight.popleft()
        for name, tokens in zip(takes, runner.collect().tokens, strict=False):
            if name >= 0:
                texts.setdefault(name, []).append(int(tokens[-1]))

    for sent in frames:
        if sent.takes is not None and len(in_flight) == runner.limits.depth:
            collect()
        runner.submit(sent.message)
        if sent.takes is not None:
            in_flight.append(sent.takes)
    while in_flight:
        collect()
    return texts
