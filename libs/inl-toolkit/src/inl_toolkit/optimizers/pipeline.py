"""Pipeline schedules and their bubble."""

from __future__ import annotations

from typing import NamedTuple, final

from inl.errors import RequestError

KINDS = ("gpipe", "1f1b")


def pipeline_bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the share of idle time: ``(S - 1) / (C * M + S - 1)``.

    Of S stages that take equal time, M micro-batches; C chunks of layers on each stage,
    interleaved. Raises :class:`~inl.errors.RequestError` for numbers below 1.
    """
    given = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise RequestError(f"{name}: found {value!r}, accepted: 1 or more")
    return (stages - 1) / (chunks * micro_batches + stages - 1)


class Slot(NamedTuple):
    """One unit of work of a stage."""

    micro_batch: int
    backward: bool
    chunk: int = 0
    """Of the layers of the stage, where schedules are interleaved."""


@final
class PipelineSchedule:
    """Which micro-batch each stage computes at each time.

    kind: "gpipe", all forward passes before the backward ones, or "1f1b", which holds
    the activations of at most ``stages`` micro-batches. Both passes take equal time.
    training: whether there are backward passes. Raises
    :class:`~inl.errors.RequestError`.
    """

    def __init__(
        self, stages: int, micro_batches: int, *, kind: str = "1f1b",
        training: bool = True,
    ) -> None:  # fmt: skip
        pipeline_bubble(stages, micro_batches)
        if kind not in KINDS:
            raise RequestError(
                f"kind: found {kind!r:.80}, accepted: {', '.join(KINDS)}"
            )
        self.stages, self.micro_batches = stages, micro_batches
        queues = [self._order(stage, kind, training) for stage in range(stages)]
        self.rows = _simulate(queues)
        """For each stage, its :class:`Slot` at each time; ``None`` while it waits."""

    @property
    def bubble(self) -> float:
        """Share of the slots of all stages that are idle, counted."""
        slots = [slot for row in self.rows for slot in row]
        return slots.count(None) / len(slots)

    @property
    def most_held(self) -> int:
        """Largest number of micro-batches whose activations a stage holds at a time."""
        most = 0
        for row in self.rows:
            held = 0
            for slot in filter(None, row):
                held += -1 if slot.backward else 1
                most = max(most, held)
        return most

    def _order(self, stage: int, kind: str, training: bool) -> list[Slot]:
        forward = [Slot(number, False) for number in range(self.micro_batches)]
        backward = [Slot(number, True) for number in range(self.micro_batches)]
        if not training:
            return forward
        if kind == "gpipe":
            return forward + backward
        ahead = min(self.stages - 1 - stage, self.micro_batches)
        order = forward[:ahead]
        for index in range(self.micro_batches):
            order += forward[ahead + index : ahead + index + 1]
            order.append(backward[index])
        return order


@final
class InterleavedSchedule:
    """A 1F1B schedule of stages with several chunks of layers each (Narayanan, 2021).

    Chunk c of stage s has the layers of part ``c * stages + s`` of the model. The
    bubble is that of :func:`pipeline_bubble`. micro_batches: a multiple of ``stages``.
    Raises :class:`~inl.errors.RequestError`.
    """

    def __init__(self, stages: int, micro_batches: int, *, chunks: int = 2) -> None:
        pipeline_bubble(stages, micro_batches, chunks)
        if micro_batches % stages:
            raise RequestError(
                f"micro_batches: found {micro_batches}, accepted: a multiple of "
                f"{stages}, the stages"
            )
        self.stages, self.micro_batches, self.chunks = stages, micro_batches, chunks
        self.rows = _simulate([self._order(stage) for stage in range(stages)], chunks)
        """For each stage, its :class:`Slot` at each time; ``None`` while it waits."""

    @property
    def bubble(self) -> float:
        """Share of the slots of all stages that are idle, counted."""
        slots = [slot for row in self.rows for slot in row]
        return slots.count(None) / len(slots)

    def _order(self, stage: int) -> list[Slot]:
        count = self.micro_batches * self.chunks
        ahead = min(
            2 * (self.stages - 1 - stage) + (self.chunks - 1) * self.stages, count
        )
        order = [self._slot(index, False) for index in range(ahead)]
        for index in range(count):
            if ahead + index < count:
                order.append(self._slot(ahead + index, False))
            order.append(self._slot(index, True))
        return order

    def _slot(self, index: int, backward: bool) -> Slot:
        turn, inside = divmod(index, self.stages * self.chunks)
        chunk, batch = divmod(inside, self.stages)
        chunk = self.chunks - 1 - chunk if backward else chunk
        return Slot(turn * self.stages + batch, backward, chunk)


@final
class HybridSchedule:
    """A pipeline on each of ``data`` copies, with ``tensor`` devices for each stage.

    micro_batches: of all copies together, divided evenly. The devices of a stage work
    at the same time, so that tensor parallelism has no bubble. Raises
    :class:`~inl.errors.RequestError`.
    """

    def __init__(
        self, *, tensor: int = 1, pipeline: int = 1, data: int = 1, micro_batches: int,
        kind: str = "1f1b", training: bool = True,
    ) -> None:  # fmt: skip
        for name, value in (("tensor", tensor), ("data", data)):
            if type(value) is not int or value < 1:
                raise RequestError(f"{name}: found {value!r}, accepted: 1 or more")
        if type(micro_batches) is not int or micro_batches % data:
            raise RequestError(
                f"micro_batches: found {micro_batches!r}, accepted: a multiple of "
                f"{data}, the copies"
            )
        one = PipelineSchedule(
            pipeline, micro_batches // data, kind=kind, training=training
        )
        self.copy = one
        """The schedule of one copy."""
        self.rows = [
            [slot and slot._replace(micro_batch=slot.micro_batch * data + copy)
             for slot in row]
            for copy in range(data) for row in one.rows for _ in range(tensor)
        ]  # fmt: skip
        """For each device, its :class:`Slot` at each time: copy by copy, stage by
        stage; micro-batches are dealt to the copies in turn."""

    @property
    def bubble(self) -> float:
        """Share of the slots of all devices that are idle, counted."""
        return self.copy.bubble


def _simulate(queues: list[list[Slot]], chunks: int = 1) -> list[list[Slot | None]]:
    """Run each stage's queue in order, as soon as its inputs are there."""
    parts = len(queues) * chunks
    done: dict[tuple[int, int, bool], int] = {}
    rows: list[list[Slot | None]] = [[] for _ in queues]
    at = [0] * len(queues)
    time = 0
    while any(at[stage] < len(queue) for stage, queue in enumerate(queues)):
        for stage, queue in enumerate(queues):
            slot = queue[at[stage]] if at[stage] < len(queue) else None
            if slot is not None:
                part = slot.chunk * len(queues) + stage
                needed = _input(part, slot, parts)
                if needed is not None and done.get(needed, time) >= time:
                    slot = None
                else:
                    done[part, slot.micro_batch, slot.backward] = time
                    at[stage] += 1
            rows[stage].append(slot)
        time += 1
    return rows


def _input(part: int, slot: Slot, parts: int) -> tuple[int, int, bool] | None:
    """Return the work that must be done before: a part before or after, or its own."""
    batch = slot.micro_batch
    if slot.backward:
        return (part, batch, False) if part == parts - 1 else (part + 1, batch, True)
    return (part - 1, batch, False) if part else None
