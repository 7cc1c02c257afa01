"""A runner without tensors, whose answer depends on every cell that it should read.

A cache cell holds a token id instead of a key and a value, and the next token is a hash
of all ids of the sequence *read through its block table*. A wrong block, an early free,
a stale prefix, a bad rollback or lost feedback changes the text, exactly.

For a sequence of ``n`` ids, with ``mix`` of :mod:`inl.scheduling.uniforms`, and all sums
modulo 2**64::

    value(i)  = adapter * 2**32 + id[i] + 1
    weight(g, i) = mix(g * 2**32 + i) | 1
    total = n + sum of value(i) * weight(g, i) over groups g and positions i
    noise = 0 at temperature 0, else mix(1 + float32 bits of the uniform)
    token = mix(total ^ noise) % vocab

or, under a mask of ``m`` allowed tokens, the ``mix(total ^ noise) % m``-th of them.
In a group whose queries see a window of ``w`` positions, a cell holds instead::

    value(i) = mix(adapter * 2**32 + id[i] + 1 + sum of value(j) * weight(g, j))

over the ``w - 1`` positions j before i, as keys depend on all that their token saw, and
the total takes the last ``w`` positions only: a block that is given away while a query
still sees it changes the text.
A sequence that needs a "sample_filtered" program has in its noise, by ``^``, what
:func:`~inl.testing.hash_cells.special` makes of its parameters, counts and biases, so
that one that is lost or wrong changes the text too. Its scores are
:func:`~inl.testing.hash_cells.scores` of its token.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inl.errors import ProtocolError, RunnerError
from inl.protocol.frame_decoder import read_admission, read_step, read_token_biases
from inl.protocol.runner import Limits, Reply, Runner
from inl.scheduling.sampling_params import rank, sampler_for
from inl.scheduling.uniforms import mix
from inl.spec.message import ADMIT, MASKED, STEP, TOKEN_BIAS, header
from inl.spec.step import PARAMS
from inl.testing.hash_cells import HashCells, allowed, scores, special

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.spec.message import IntArray


@dataclass(slots=True, eq=False)
class SlotState:
    """One admission to a slot, until its release."""

    tables: list[NDArray[np.int64]]
    """[B] block table of each group; replaced, never written to."""
    length: int
    """Tokens cached once every submitted step is done."""
    last: int
    """Last token chosen, by the steps that are done."""
    adapter: int
    params: tuple[float, ...]
    counts: Counter[int] = field(default_factory=Counter)
    """As in ``Tables.token_counts``."""
    bias: dict[int, float] = field(default_factory=dict)
    fed: bool = False
    """Whether a step had tokens of it."""
    queue: deque[Task] = field(default_factory=deque)
    """Rows submitted and not done, in order."""
    sampler: str = field(init=False)

    def __post_init__(self) -> None:
        self.find_sampler()

    def find_sampler(self) -> None:
        """Note the cheapest program that serves it."""
        params = dict(zip(PARAMS, self.params, strict=True))
        self.sampler = sampler_for(params, special=any(self.bias.values()))


@dataclass(slots=True, eq=False)
class Task:
    """One row of a step, with all that it depends on but the cells and feedback."""

    flight: Flight
    index: int
    seat: SlotState
    tables: list[NDArray[np.int64]]
    start: int
    tokens: list[int]
    uniform: int
    """Float32 bits."""
    decodes: bool
    """Whether its token is one more of the answer."""
    done: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was submitted and not collected."""

    step: int
    tokens: NDArray[np.int32]
    """[R, 1] chosen so far."""
    masks: NDArray[np.int32] | None = None
    waits: bool = False
    """Whether its masks have still to come."""
    full: bool = False
    """Whether its program tells scores."""
    tasks: list[Task] = field(default_factory=list)


class HashRunner(Runner):
    """Computes hashes in place of a model and checks every frame it is given.

    Rows of different sequences that are in flight at once do not depend on each other,
    and nothing says in which order a device computes them. By default that is the order
    of submission; with ``lag``, it is drawn at random, as late as at ``collect``, so
    that a block which is given away too early is overwritten before it is read.
    """

    def __init__(self, limits: Limits, *, lag: Random | None = None) -> None:
        self.limits = limits
        self._lag = lag
        self._flights: deque[Flight] = deque()
        self._seats: dict[int, SlotState] = {}
        self._step: int | None = None
        self._closed = False
        self._cells = HashCells(limits)

    @property
    def slots_in_use(self) -> list[int]:
        """Slots that were admitted and not released."""
        return sorted(self._seats)

    def submit(self, message: IntArray) -> None:
        """Check a frame and queue it; rows are computed now or, with ``lag``, later."""
        self._check_open()
        found = header(message)
        if found.kind == STEP:
            self._submit_step(message)
        elif found.kind == ADMIT:
            self._admit(message)
        elif found.kind == TOKEN_BIAS:
            self._mark(message)
        else:
            self._release(message)

    def _admit(self, message: IntArray) -> None:
        found = read_admission(message, self.limits)
        seat = SlotState(
            [np.array(ids, np.int64) for ids in found.blocks],
            found.length,
            found.last,
            found.adapter,
            found.params,
        )
        self._check_table(found.slot, seat, seat.length)
        self._seats[found.slot] = seat

    def _mark(self, message: IntArray) -> None:
        found = read_token_biases(message, self.limits)
        seat = self._seat(found.slot)
        if seat.fed:
            raise ProtocolError(f"marks of slot {found.slot}: come after its tokens")
        for token, count, bias in found.marks:
            seat.counts[token] += count
            seat.bias[token] = seat.bias.get(token, 0.0) + bias
        seat.find_sampler()

    def _release(self, message: IntArray) -> None:
        found = read_admission(message, self.limits)
        if self._seats.pop(found.slot, None) is None:
            raise ProtocolError(f"release: slot {found.slot} is not admitted")

    def _submit_step(self, message: IntArray) -> None:
        found, rows, cells = read_step(message, header(message), self.limits)
        if len(self._flights) >= self.limits.depth:
            raise ProtocolError(
                f"step {found.step}: {len(self._flights)} steps are in flight, "
                f"accepts {self.limits.depth}; collect first"
            )
        if self._step is not None and found.step != (self._step + 1) % (1 << 31):
            raise ProtocolError(f"step {found.step}: follows step {self._step}")
        for group, slot, index, block in cells:
            tables = self._seat(slot).tables = list(self._seat(slot).tables)
            tables[group] = tables[group].copy()
            tables[group][index] = block
        tokens = np.zeros((found.rows, 1), np.int32)
        flight = Flight(
            found.step,
            tokens,
            waits=bool(found.flags & MASKED),
            full=found.bucket.sampler == "sample_filtered",
        )
        for index, row in enumerate(rows):
            seat = self._seat(row.slot)
            if rank(seat.sampler) > rank(found.bucket.sampler):
                raise ProtocolError(
                    f"step {found.step}, row {index}: needs a {seat.sampler} program "
                    f"for {seat.params}, found a {found.bucket.sampler} one"
                )
            task = Task(
                flight, index, seat, seat.tables, seat.length, *row[1:],
                decodes=index < found.decode_rows,
            )  # fmt: skip
            seat.length += len(row.tokens)
            seat.fed = True
            self._check_table(row.slot, seat, task.start)
            seat.queue.append(task)
            flight.tasks.append(task)
        self._flights.append(flight)
        self._step = found.step
        self._work()

    def _seat(self, slot: int) -> SlotState:
        if slot not in self._seats:
            raise ProtocolError(
                f"slot {slot}: is not admitted; admitted are {self.slots_in_use}"
            )
        return self._seats[slot]

    def _check_table(self, slot: int, seat: SlotState, start: int) -> None:
        blocks = -(-seat.length // self.limits.block_size)
        for group, table in enumerate(seat.tables):
            first = self.limits.before_window(group, start)
            if blocks > len(table) or not table[first:blocks].all():
                raise ProtocolError(
                    f"slot {slot}, group {group}: {seat.length} tokens need {blocks} "
                    f"blocks, found table {table.tolist()}"
                )

    def _work(self) -> None:
        tasks = [task for flight in self._flights for task in flight.tasks]
        if self._lag is not None:
            self._lag.shuffle(tasks)
            tasks = [task for task in tasks if self._lag.getrandbits(1)]
        for task in tasks:
            if not task.done and not task.flight.waits and task.seat.queue[0] is task:
                self._run(task)

    def _run(self, task: Task) -> None:
        """Write a row's tokens, read its whole sequence, and choose the next token."""
        task.done = True
        seat = task.seat
        seat.queue.popleft()
        first = task.tokens[0] if task.tokens[0] >= 0 else seat.last
        ids = [first, *task.tokens[1:]]
        self._cells.write(task.tables, task.start, ids, seat.adapter)
        total = self._cells.total(task.tables, task.start + len(ids))
        noise = mix(1 + task.uniform) if seat.params[0] else 0
        if task.decodes:
            seat.counts[first] += 2
        if seat.sampler == "sample_filtered":
            noise ^= special(seat.params, seat.counts, seat.bias)
        seat.last = self._pick(mix(total ^ noise), task)
        task.flight.tokens[task.index, 0] = seat.last

    def _pick(self, number: int, task: Task) -> int:
        masks = task.flight.masks
        if masks is None:
            return number % self.limits.vocab
        tokens = allowed(masks[task.index], self.limits.vocab)
        return tokens[number % len(tokens)]

    def sample(self, step: int, masks: IntArray) -> None:
        """Give the masks of a step that waits for them."""
        self._check_open()
        flight = next((each for each in self._flights if each.step == step), None)
        if flight is None or not flight.waits:
            raise ProtocolError(f"masks of step {step}: no such step waits for masks")
        shape = len(flight.tokens), -(-self.limits.vocab // 32)
        if masks.shape != shape or masks.dtype != np.int32:
            raise ProtocolError(
                f"masks of step {step}: found {masks.dtype} {list(masks.shape)}, "
                f"accepts int32 {list(shape)}"
            )
        for row in range(len(flight.tasks)):
            if not allowed(masks[row], self.limits.vocab):
                raise ProtocolError(f"masks of step {step}, row {row}: allow no token")
        flight.masks = masks.copy()
        flight.waits = False
        self._work()

    def collect(self) -> Reply:
        """Finish the oldest step in flight."""
        self._check_open()
        if not self._flights:
            raise ProtocolError("collect: no step is in flight")
        flight = self._flights[0]
        if flight.waits:
            raise ProtocolError(f"collect: step {flight.step} waits for its masks")
        # The steps before it are collected, so none of its rows waits for another.
        for task in flight.tasks:
            if not task.done:
                self._run(task)
        self._flights.popleft()
        told = scores(flight.tokens[:, 0], self.limits.vocab) if flight.full else None
        accepted = np.ones(len(flight.tokens), np.int32)
        return Reply(flight.step, flight.tokens, accepted, told)

    def close(self) -> None:
        """Forget everything; closing twice is allowed."""
        self._closed = True
        self._flights.clear()
        self._seats.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RunnerError("runner: is closed")
