"""A runner without tensors whose tokens depend on every cache entry that it reads.

A cache entry holds a token id instead of a key and a value, and the next token is a
hash of all ids of the sequence *read through its block table*. A wrong block, an early
free, a stale prefix, a bad rollback or lost feedback changes the text, exactly.

For a sequence of ``n`` ids, with ``mix`` of :mod:`inl.spec.uniforms`, and all
sums modulo 2**64::

    value(i)  = adapter * 2**32 + id[i] + 1
    weight(g, i) = mix(g * 2**32 + i) | 1
    total = n + sum of value(i) * weight(g, i) over groups g and positions i
    noise = 0 at temperature 0, else mix(1 + float32 bits of the uniform)
    token = mix(total ^ noise) % vocab

or, under a mask of ``m`` allowed tokens, the ``mix(total ^ noise) % m``-th of them.
``adapter`` is 0 without one, else :func:`~inl.testing.hash_cells.adapter_value` of the
digest that its number had at the admission, and an embedding has the id
:func:`~inl.testing.hash_cells.embedding_id`.
In a group whose queries see a window of ``w`` positions, an entry holds instead::

    value(i) = mix(adapter * 2**32 + id[i] + 1 + sum of value(j) * weight(g, j))

over the ``w - 1`` positions j before i, as keys depend on all that their token has
seen, and the total takes the last ``w`` positions only: freeing a block that a query
still sees changes the text. For a sequence that needs a "sample_filtered" program,
:func:`~inl.testing.hash_cells.filtered_noise` of its parameters, counts and biases is
combined into the noise with ``^``, so that a lost or wrong one changes the text too.
Scores are :func:`~inl.testing.hash_cells.scores` of the token, and a pooled step has
:func:`~inl.testing.hash_cells.hidden_row` of the total.

A row that verifies drafts computes one token after the other, and stops at the first
that differs from the draft that follows it. All of its ids are written, so that stale
entries remain after the accepted ones, as on a device. A row of a repeated step also
computes one token after the other, each the input of the next, until its stop.

Contents that READ and WRITE frames copy are the halves of each entry, so that a swap of
keys and values changes the text. Rows that were submitted before are computed first.

With ``recurrent``, each slot has state that every token changes, and that is added to
the total of the next one::

    state = 0 before position 0; then mix(state + adapter * 2**32 + id[i] + 1)

As on a device it stays in a slot whose sequence has ended, and READ and WRITE frames of
the slot copy its halves.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inl.dtypes import HostArray
from inl.errors import ProtocolError
from inl.protocol.frame_decoder import StepRow, read_step
from inl.protocol.runner import (
    AdapterSource,
    Limits,
    PendingRead,
    PipelinedRunner,
    Reply,
    StepInFlight,
    pooled_reply,
    scored_reply,
)
from inl.protocol.slot_decoder import read_admission, read_token_biases
from inl.scheduling.sampling_params import rank
from inl.spec.cache import Slotted
from inl.spec.cache_layout import SLOT_GROUP, BlockLayout, CacheLayout
from inl.spec.message import (
    ADMIT,
    DRAFT,
    MASKED,
    POOLED,
    READ,
    SCORED,
    STEP,
    TOKEN_BIAS,
    Header,
    transferred,
)
from inl.spec.scored_tokens import next_tokens
from inl.spec.step import NO_TOKEN
from inl.spec.uniforms import MASK, mix
from inl.testing.hash_cells import (
    HIDDEN,
    HashCells,
    adapter_value,
    allowed,
    filtered_noise,
    hidden_row,
    scores,
    with_embedded_ids,
)
from inl.testing.hash_state import RowTask, SlotState, StepTasks

if TYPE_CHECKING:
    from inl.spec.cache_layout import Parts
    from inl.spec.message import IntArray

STEP_NUMBERS = 1 << 31

CHAIN = Slotted("chain", (2,), "int32", "tokens", ("snapshot",))
"""Recurrent state of a slot: the halves of a number."""


class HashRunner(PipelinedRunner):
    """Computes hashes in place of a model and checks every frame strictly.

    lag: by default rows are computed in the order of submission, during ``submit``.
    With ``lag`` the order is random, as late as during ``collect``, as on a device
    where rows of different sequences do not depend on each other: a block that is
    freed too early is overwritten before it is read. recurrent: whether tokens depend
    on recurrent state too; drafts are not verified then.
    """

    survives_fork = True
    least_rows = 1
    """Fewest rows of a step; 0 for a rank of several that divide the rows."""

    def __init__(
        self, limits: Limits, *, lag: Random | None = None, recurrent: bool = False
    ) -> None:
        super().__init__()
        self.limits = limits
        self.cells = HashCells(limits)
        self.slots: dict[int, SlotState] = {}
        """State of the admitted slots."""
        self.adapters: dict[int, str] = {}
        """Digest of each loaded adapter, by number."""
        self.chains: dict[int, int] | None = {} if recurrent else None
        """Recurrent state of each slot, if there is any."""
        self._lag = lag
        self._step: int | None = None

    @property
    def slots_in_use(self) -> list[int]:
        """Slots that were admitted and not released."""
        return sorted(self.slots)

    def _submit_frame(
        self, message: IntArray, head: Header
    ) -> StepTasks | Parts | None:
        if head.kind == STEP:
            return self._submit_step(message, head)
        if head.kind == READ:
            self._compute_all()
            return self._copied(*transferred(message))
        if head.kind == ADMIT:
            if self.chains is not None:
                self._compute_all()  # rows of the slot's last sequence
            state = SlotState.admit(read_admission(message, self.limits))
            state.adapter = self._adapter(state.adapter)
            self._check_table(state, state.length)
            self.slots[state.slot] = state
        elif head.kind == TOKEN_BIAS:
            self._set_token_bias(message)
        else:
            slot = read_admission(message, self.limits).slot
            if self.slots.pop(slot, None) is None:
                raise ProtocolError(f"release: slot {slot} is not admitted")
        return None

    @property
    def cache_layout(self) -> CacheLayout:
        """Two numbers, int32, for each token: the halves of a cell."""
        group = BlockLayout(1, self.limits.block_size, 1, 1, "int32")
        slotted = () if self.chains is None else (CHAIN,)
        return CacheLayout((group,) * self.limits.groups, slotted)

    def _copied(self, group: int, ids: list[int]) -> Parts:
        """Return contents of the cache, or of a slot."""
        if group != SLOT_GROUP:
            return self.cells.copied(group, ids)
        if self.chains is None:
            return {}
        words = np.array([self.chains.get(ids[0], 0)], "<u8").view(np.int32)
        return {CHAIN.name: HostArray(words, CHAIN.dtype, words.shape)}

    def _read(self, pending: PendingRead) -> Parts:
        parts: Parts = pending.work
        return parts

    def _write(self, message: IntArray, parts: Parts) -> None:
        self._compute_all()
        group, ids = transferred(message)
        if group != SLOT_GROUP:
            self.cells.overwrite(group, ids, parts)
        elif self.chains is not None:
            words = np.ascontiguousarray(parts[CHAIN.name].data)
            self.chains[ids[0]] = int(words.view("<u8")[0])

    def _change(self, state: SlotState, start: int, ids: list[int]) -> None:
        """Change the recurrent state of a slot by tokens from position ``start``."""
        if self.chains is None:
            return
        chain = self.chains.get(state.slot, 0) if start else 0
        for token in ids:
            chain = mix((chain + (state.adapter << 32) + token + 1) & MASK)
        self.chains[state.slot] = chain

    def _total(self, task: RowTask) -> int:
        """Return the sum over all that the next token depends on."""
        total = self.cells.total(task.tables, task.state.cached)
        if self.chains is not None:
            total += self.chains[task.state.slot]
        return total & MASK

    def _compute_all(self) -> None:
        """Compute all submitted rows, in order."""
        for flight in self._in_flight:
            for task in flight.work.rows:
                if not task.done:
                    self._compute(task)

    def _load_adapter(self, source: AdapterSource) -> None:
        self.adapters[source.number] = source.digest

    def _adapter(self, number: int) -> int:
        """Return the value of a loaded adapter."""
        if not number:
            return 0
        if number not in self.adapters:
            raise ProtocolError(
                f"admission: adapter {number} is not loaded; loaded are "
                f"{sorted(self.adapters)}"
            )
        return adapter_value(self.adapters[number])

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
        frame = read_step(message, head, self.limits, least_rows=self.least_rows)
        rows = with_embedded_ids(frame.rows, frame.embeddings)
        if self._step is not None and head.step != (self._step + 1) % STEP_NUMBERS:
            raise ProtocolError(f"step {head.step}: follows step {self._step}")
        for update in frame.updates:
            self._state(update.slot).update_table(update)
        bucket = head.bucket
        tokens = np.full((head.rows, bucket.reply_width), NO_TOKEN, np.int32)
        samples, masked = np.zeros(bucket.samples, np.int32), head.flags & MASKED
        step = StepTasks(head.step, bucket, tokens, samples, bool(masked))
        if head.flags & SCORED:
            limits = self.limits
            step.scored = next_tokens(
                message, groups=limits.groups, block_size=limits.block_size,
                vocab=limits.vocab,
            )  # fmt: skip
        if head.flags & POOLED:
            step.hidden = np.zeros((head.rows, HIDDEN), np.float32)
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
        verifies, count = head.bucket.verifies, len(row.tokens) + row.steps - 1
        before = sum(len(task.row.tokens) for task in step.rows)
        task = RowTask(
            step, index, state, state.tables, row, before if verifies else index,
            decodes=index < head.decode_rows,
        )  # fmt: skip
        least = state.length - state.uncertain
        state.length += count
        state.uncertain += count - 1 if verifies else 0
        state.has_steps = True
        self._check_table(state, least)
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
        state, step = task.state, task.step
        state.queue.popleft()
        if step.bucket.repeat > 1:
            self._repeat(task)
            return
        ids, start = _inputs(task), state.cached
        self.cells.write(task.tables, start, ids, state.adapter)
        self._change(state, start, ids)
        if not step.bucket.verifies:
            state.cached += len(ids)
            if step.hidden is not None:
                step.hidden[task.index] = hidden_row(self._total(task))
                return
            if step.scored is not None:
                return
            if task.decodes:
                state.counts[ids[0]] += 2
            state.last = self._sample_token(task, task.sample, state.cached)
            step.tokens[task.index, 0] = state.last
            return
        for place in range(len(ids)):
            if place and ids[place] != state.last:
                break
            state.cached += 1
            if task.decodes:
                state.counts[ids[place]] += 2
            state.last = self._sample_token(task, task.sample + place, state.cached)
            step.tokens[task.index, place] = state.last
        state.uncertain -= len(ids) - 1
        state.length -= len(ids) - (state.cached - start)

    def _repeat(self, task: RowTask) -> None:
        """Compute a row of a repeated step, token by token, until its stop.

        Its sequence ends there: rows that follow compute nothing, and ``state.length``
        is that of all planned tokens.
        """
        state, (given,), stops = task.state, task.row.tokens, task.row.stop_ids
        stopped = given < 0 and state.last in stops
        token = state.last if given < 0 else given
        for place in range(0 if stopped else task.row.steps):
            self.cells.write(task.tables, state.cached, [token], state.adapter)
            self._change(state, state.cached, [token])
            state.cached += 1
            state.counts[token] += 2
            token = state.last = self._sample_token(task, task.sample, place)
            task.step.tokens[task.index, place] = token
            if self._stops(task, token):
                break

    def _stops(self, task: RowTask, token: int) -> bool:
        """Whether a row of a repeated step computes nothing after a token."""
        return token in task.row.stop_ids

    def _sample_token(self, task: RowTask, sample: int, number: int) -> int:
        """Sample the token after those that are cached, with a uniform number."""
        state, total = task.state, self._total(task)
        uniforms = task.row.uniforms
        noise = 0
        if state.params[0]:
            noise = mix(1 + uniforms[number % len(uniforms)])
        if state.sampler == "sample_filtered":
            noise ^= filtered_noise(state.params, state.counts, state.bias)
        number, vocab = mix(total ^ noise), self.limits.vocab
        masks, token = task.step.masks, number % vocab
        if masks is not None:
            tokens = allowed(masks[sample], vocab)
            token = tokens[number % len(tokens)]
        task.step.samples[sample] = token
        return token

    def _sample(self, flight: StepInFlight, masks: IntArray) -> None:
        step: StepTasks = flight.work
        used = flight.head.used_tokens if step.bucket.verifies else len(step.rows)
        for sample in range(used):
            if not allowed(masks[sample], self.limits.vocab):
                raise ProtocolError(
                    f"masks of step {flight.head.step}, row {sample}: allow no token"
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
        step.rows.clear()  # they refer to the step
        if step.hidden is not None:
            return pooled_reply(flight.head.step, step.hidden)
        if step.scored is not None:
            found = scores(step.scored, self.limits.vocab)
            return scored_reply(flight.head.step, flight.head.rows, found)
        if step.bucket.sampler != "sample_filtered":
            return Reply(flight.head.step, step.tokens)
        scored = scores(step.samples, self.limits.vocab)
        return Reply(flight.head.step, step.tokens, scored)

    def _reset(self) -> None:
        self.slots.clear()
        self._step = None

    def _close(self) -> None:
        self.slots.clear()


def _inputs(task: RowTask) -> list[int]:
    """Return a row's ids: given ones, the slot's last token, drafts by position."""
    start, drafts = task.state.cached, task.row.drafts
    ids: list[int] = []
    for position, token in enumerate(task.row.tokens, start=start):
        if token == DRAFT:
            ids.append(drafts[position % len(drafts)])
        else:
            ids.append(token if token >= 0 else task.state.last)
    return ids
