"""Pipeline schedules and their bubble."""

from __future__ import annotations

from typing import NamedTuple, final

from inl.errors import RequestError

KINDS = ("gpipe", "1f1b")


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Return the share of idle time: ``(S - 1) / (M + S - 1)``.

    Of S stages that take equal time, M micro-batches. Raises
    :class:`~inl.errors.RequestError` for numbers below 1.
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        if type(value) is not int or value < 1:
            raise RequestError(f"{name}: found {value!r}, accepted: 1 or more")
    return (stages - 1) / (micro_batches + stages - 1)


class Slot(NamedTuple):
    """One unit of work of a stage."""

    micro_batch: int
    backward: bool


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


def _simulate(queues: list[list[Slot]]) -> list[list[Slot | None]]:
    """Run each stage's queue in order, as soon as its inputs are there."""
    last = len(queues) - 1
    done: dict[tuple[int, Slot], int] = {}
    rows: list[list[Slot | None]] = [[] for _ in queues]
    at = [0] * len(queues)
    time = 0
    while any(at[stage] < len(queue) for stage, queue in enumerate(queues)):
        for stage, queue in enumerate(queues):
            slot = queue[at[stage]] if at[stage] < len(queue) else None
            if slot is not None and done.get(_input(stage, slot, last), -1) >= time:
                slot = None
            elif slot is not None and _input(stage, slot, last) not in done:
                slot = None if _has_input(stage, slot) else slot
            if slot is not None:
                done[stage, slot] = time
                at[stage] += 1
            rows[stage].append(slot)
        time += 1
    return rows


def _has_input(stage: int, slot: Slot) -> bool:
    return slot.backward or stage > 0


def _input(stage: int, slot: Slot, last: int) -> tuple[int, Slot]:
    """Return the work that must be done before: a stage before or after, or its own."""
    if slot.backward:
        own = Slot(slot.micro_batch, False)
        return (stage, own) if stage == last else (stage + 1, slot)
    return (stage - 1, slot)
