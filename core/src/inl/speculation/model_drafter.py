"""A drafter that asks a small model, on any runner."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.errors import InlError
from inl.scheduling.request import Request

if TYPE_CHECKING:
    from inl.engine.core import EngineCore
    from inl.speculation.draft_counts import StepTimes
    from inl.speculation.drafters import DraftQuery

log = logging.getLogger("inl")


class ModelDrafter:
    """Predicts the most likely tokens of another model with the same vocabulary.

    It generates on an engine core of its own, all sequences in one batch; its prefix
    cache keeps what earlier queries of a sequence have computed. The core's runner may
    belong to another device or process, and is closed with the drafter. If it fails,
    that is logged, and nothing is predicted from then on.

    vocab: predictions end before a token that the target model does not have. times:
    of steps of the runner, by rows. token_seconds: of a token of a prompt. Without
    these, it is asked wherever drafts are verified.
    """

    def __init__(
        self, core: EngineCore, *, vocab: int, times: StepTimes | None = None,
        token_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self._core, self._vocab = core, vocab
        self._times, self._token_seconds = times, token_seconds
        self._has_failed = False

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        if self._has_failed:
            return [()] * len(queries)
        try:
            requests = [self._add(query) for query in queries]
            while self._core.has_work:
                for event in self._core.step():
                    if event.error is not None:
                        raise event.error
        except InlError as error:
            log.warning("draft model: stopped drafting: %s", error)
            self._has_failed = True
            return [()] * len(queries)
        return [self._known(request) for request in requests]

    def seconds(self, rows: int, drafts: int) -> float:
        """Seconds of a step for each draft; the first one reads the accepted tokens."""
        if self._times is None:
            return 0.0
        return drafts * self._times.without_drafts(rows)

    def prompt_seconds(self, tokens: int) -> float:
        return tokens * self._token_seconds

    def _add(self, query: DraftQuery) -> Request | None:
        """Queue a query; ``None`` if it exceeds the draft model's context."""
        if len(query.tokens) + 1 >= self._core.context:
            return None
        request = Request(query.tokens, max_tokens=query.limit, ignore_eos=True)
        self._core.add(request)
        return request

    def _known(self, request: Request | None) -> list[int]:
        ids = request.output_ids if request is not None else []
        unknown = (at for at, token in enumerate(ids) if token >= self._vocab)
        return ids[: next(unknown, len(ids))]

    def forget(self, request: int) -> None:
        """Nothing is stored of a request; blocks of its tokens are evicted later."""

    def close(self) -> None:
        self._has_failed = True
        self._core.runner.close()
