"""The interface of speculation: adds drafted tokens to planned steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from inl.scheduling.buckets import Buckets
    from inl.scheduling.plan import Chunk, Plan, StepBuilder
    from inl.scheduling.request import Request
    from inl.scheduling.running_requests import RunningRequests


class DraftPlanner(Protocol):
    """What a scheduler calls for decoding rows that may verify drafts.

    A step has drafts or prompt chunks, not both. Rows are planned as if all drafts in
    flight were accepted; the tables of the runner know the real positions, and
    :meth:`collected` corrects ``Request.scheduled``.
    """

    def must_wait(self, request: Request, *, prompts: bool) -> bool:
        """Whether a request at an uncertain position waits until it is known.

        Only a step that verifies drafts has random numbers for several positions.
        prompts: whether the step may get prompt chunks, and then no drafts.
        """

    def planned(self, plan: Plan, requests: int, buckets: Buckets) -> bool:
        """Choose the requests whose drafts come from hidden states of their steps.

        requests: that run or wait. Returns whether hidden states of the step are read.
        Then it is collected before another one is planned.
        """

    def extend(
        self, step: StepBuilder, requests: RunningRequests, buckets: Buckets
    ) -> None:
        """Add drafts to the decoding rows of a step without prompt chunks."""

    def collected(self, chunk: Chunk, accepted: int) -> None:
        """Correct a request for the rejected tokens of a collected row.

        accepted: tokens of the row that were accepted, at least 1.
        """

    def processed(self, chunks: Sequence[Chunk]) -> None:
        """Follow the requests of a step whose outputs have been applied."""

    def forget(self, request: Request) -> None:
        """Drop what is stored of a request that has ended."""
