"""A runner without tensors whose tokens depend on every cache entry that it reads.

A cache entry holds a token id instead of a key and a value, and the next token is a
hash of all ids of the sequence *read through its block table*. A wrong block, an early
free, a stale prefix, a bad rollback or lost feedback changes the text, exactly.

For a sequence of ``n`` ids, with ``mix`` of :mod:`inl.scheduling.uniforms`, and all
sums modulo 2**64::

    value(i)  = adapter * 2**32 + id[i] + 1
    weight(g, i) = mix(g * 2**32 + i) | 1
    total = n + sum of value(i) * weight(g, i) over groups g and positions i
    noise = 0 at temperature 0, else mix(1 + float32 bits of the uniform)
    token = mix(total ^ noise) % vocab

or, under a mask of ``m`` allowed tokens, the ``mix(total ^ noise) % m``-th of them.
In a group whose queries see a window of ``w`` positions, an entry holds instead::

    value(i) = mix(adapter * 2**32 + id[i] + 1 + sum of value(j) * weight(g, j))

over the ``w - 1`` positions j before i, as keys depend on all that their token has
seen, and the total takes the last ``w`` positions only: freeing a block that a query
still sees changes the text. For a sequence that needs a "sample_filtered" program,
:func:`~inl.testing.hash_cells.filtered_noise` of its parameters, counts and biases is
combined into the noise with ``^``, so that a lost or wrong one changes the text too.
Scores are :func:`~inl.testing.hash_cells.scores` of the token.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inl.errors import ProtocolError
from inl.protocol.frame_decoder import StepRow, read_step
from inl.protocol.runner import Limits, PipelinedRunner, Reply, StepInFlight
from inl.protocol.slot_decoder import read_admission, read_token_biases
from inl.scheduling.sampling_params import rank
from inl.scheduling.uniforms import mix
from inl.spec.message import ADMIT, MASKED, STEP, TOKEN_BIAS, Header
from inl.testing.hash_cells import HashCells, allowed, filtered_noise, scores
from inl.testing.hash_state import RowTask, SlotState, StepTasks

if TYPE_CHECKING:
    from inl.spec.message import IntArray

STEP_NUMBERS = 1 << 31


class HashRunner(PipelinedRunner):
    """Computes hashes in place of a model and checks every frame strictly.

    lag: by default rows are computed in the order of submission, during ``submit``.
    With ``lag`` the order is random, as late as during ``collect``, as on a device
    where rows of different sequences do not depend on each other: a block that is
    freed too early is overwritten before it is read.
    """

    survives_fork = True

    def __init__(self, limits: Limits, *, lag: Random | None = None) -> None:
        super().__init__()
        self.limits = limits
        self.cells = HashCells(limits)
        self.slots: dict[int, SlotState] = {}
        """State of the admitted slots."""
        self._lag = lag
        self._step: int | None = None

    @property
    def slots_in_use(self) -> list[int]:
        """Slots that were admitted and not released."""
        return sorted(self.slots)

    def _submit_frame(self, message: IntArray, head: Header) -> StepTasks | None:
        if head.kind == STEP:
            return self._submit_step(message, head)
        if head.kind == ADMIT:
            state = SlotState.admit(read_admission(message, self.limits))
            self._check_table(state, state.length)
            self.slots[state.slot] = state
        elif head.kind == TOKEN_BIAS:
            self._set_token_bias(message)
        else:
            slot = read_admission(message, self.limits).slot
            if self.slots.pop(slot, None) is None:
                raise ProtocolError(f"release: slot {slot} is not admitted")
        return None

    def _set_token_bias(self, message: IntArray) -> None:
        slot, biases = read_token_biases(message, self.limits)
        state = self._state(slot)
        if state.has_steps:
            raise ProtocolError(
                f"token biases of slot {slot}: found after a step of the slot, "
                "accepted before its first"
            )
        state.add_biases(biases)

    def _submit_step(self, message: IntArray, head: Header) -> StepTasks:
        _, rows, updates = read_step(message, head, self.limits)
        if self._step is not None and head.step != (self._step + 1) % STEP_NUMBERS:
            raise ProtocolError(f"step {head.step}: follows step {self._step}")
        for update in updates:
            self._state(update.slot).update_table(update)
        tokens, masked = np.zeros((head.rows, 1), np.int32), bool(head.flags & MASKED)
        step = StepTasks(head.step, head.bucket, tokens, masked)
        for index, row in enumerate(rows):
            self._add_row(step, index, row, head)
        self._step = head.step
        in_flight = [flight.work for flight in self._in_flight]
        self._compute_rows([*in_flight, step])
        return step

    def _add_row(self, step: StepTasks, index: int, row: StepRow, head: Header) -> None:
        state = self._state(row.slot)
        if rank(state.sampler) > rank(head.bucket.sampler):
            raise ProtocolError(
                f"step {head.step}, row {index}: needs a {state.sampler} program "
                f"for {state.params}, found a {head.bucket.sampler} one"
            )
        task = RowTask(
            step, index, state, state.tables, state.length, row.tokens, row.uniform,
            decodes=index < head.decode_rows,
        )  # fmt: skip
        state.length += len(row.tokens)
        state.has_steps = True
        self._check_table(state, task.start)
        state.queue.append(task)
        step.rows.append(task)

    def _state(self, slot: int) -> SlotState:
        if slot not in self.slots:
            raise ProtocolError(
                f"slot {slot}: is not admitted; admitted are {self.slots_in_use}"
            )
        return self.slots[slot]

    def _check_table(self, state: SlotState, start: int) -> None:
        blocks = -(-state.length // self.limits.block_size)
        for group, table in enumerate(state.tables):
            first = self.limits.before_window(group, start)
            if blocks > len(table) or not table[first:blocks].all():
                raise ProtocolError(
                    f"slot {state.slot}, group {group}: {state.length} tokens need "
                    f"{blocks} blocks, found table {table.tolist()}"
                )

    def _compute_rows(self, steps: list[StepTasks]) -> None:
        """Compute the rows that are ready; with ``lag``, some of them."""
        tasks = [task for step in steps for task in step.rows]
        if self._lag is not None:
            self._lag.shuffle(tasks)
            tasks = [task for task in tasks if self._lag.getrandbits(1)]
        for task in tasks:
            if task.done or task.step.needs_masks:
                continue
            if task.state.queue[0] is task:
                self._compute(task)

    def _compute(self, task: RowTask) -> None:
        """Write a row's tokens, read its whole sequence, and sample the next token."""
        task.done = True
        state = task.state
        state.queue.popleft()
        first = task.tokens[0] if task.tokens[0] >= 0 else state.last
        ids = [first, *task.tokens[1:]]
        self.cells.write(task.tables, task.start, ids, state.adapter)
        total = self.cells.total(task.tables, task.start + len(ids))
        noise = mix(1 + task.uniform) if state.params[0] else 0
        if task.decodes:
            state.counts[first] += 2
        if state.sampler == "sample_filtered":
            noise ^= filtered_noise(state.params, state.counts, state.bias)
        state.last = self._sample_token(mix(total ^ noise), task)
        task.step.tokens[task.index, 0] = state.last

    def _sample_token(self, number: int, task: RowTask) -> int:
        masks = task.step.masks
        if masks is None:
            return number % self.limits.vocab
        tokens = allowed(masks[task.index], self.limits.vocab)
        return tokens[number % len(tokens)]

    def _sample(self, flight: StepInFlight, masks: IntArray) -> None:
        step: StepTasks = flight.work
        for row in range(len(step.rows)):
            if not allowed(masks[row], self.limits.vocab):
                raise ProtocolError(
                    f"masks of step {flight.head.step}, row {row}: allow no token"
                )
        step.masks = masks.copy()
        step.needs_masks = False
        self._compute_rows([each.work for each in self._in_flight])

    def _collect(self, flight: StepInFlight) -> Reply:
        step: StepTasks = flight.work
        # Earlier steps are collected, so none of these rows waits for another step.
        for task in step.rows:
            if not task.done:
                self._compute(task)
        if step.bucket.sampler != "sample_filtered":
            return Reply(flight.head.step, step.tokens)
        scored = scores(step.tokens[:, 0], self.limits.vocab)
        return Reply(flight.head.step, step.tokens, scored)

    def _reset(self) -> None:
        self.slots.clear()
        self._step = None

    def _close(self) -> None:
        self.slots.clear()
