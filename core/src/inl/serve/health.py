"""Whether the next request would be answered: after an error, test requests decide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from inl.errors import message as message_of
from inl.serve.api_error import ApiError, as_api_error

log = logging.getLogger("inl.serve")

TEST_SECONDS = 30.0
"""Time limit of a test."""

VERDICT_SECONDS = 1.0
"""Time that ``/ready`` waits for the verdict of a test."""

FIRST_SECONDS, MOST_SECONDS = 0.1, 30.0
"""Time between two tests: the first, and the longest; each is twice the one before."""

SERVER_FAULTS = ("process_failed", "model_load_failed")
"""Codes of errors that other requests would get, too, besides those of status 500."""


def is_server_fault(error: BaseException) -> bool:
    """Whether an error of a request is not the fault of this request alone."""
    failure = as_api_error(error)
    return failure.status == 500 or failure.code in SERVER_FAULTS


def _kind(error: BaseException) -> str:
    """Return what all may read: messages of other errors may have paths."""
    return error.message if isinstance(error, ApiError) else type(error).__name__


class Health:
    """What is known of a model since its last error. Used by one event loop.

    test: does what a request needs, and raises if that fails. It is called after an
    error, until it succeeds. changed: called with the problem when it has changed.
    """

    def __init__(
        self,
        name: str,
        test: Callable[[], Awaitable[None]],
        changed: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.problem: str | None = None
        """Why the next request may fail; ``None`` if nothing says so."""
        self._test, self._changed = test, changed
        self._verdict: asyncio.Future[str | None] | None = None
        """Verdict of a test that begins after the last error."""
        self._has_begun = False
        """Whether this test has begun, or ended with a problem."""
        self._task: asyncio.Task[None] | None = None

    def judge(self, error: BaseException) -> None:
        """Begin tests if an error of a request may be met by the next one, too."""
        if is_server_fault(error):
            self.suspect(f"a request failed: {_kind(error)}")

    def suspect(self, problem: str) -> None:
        """Begin tests."""
        self._set(problem)
        if self._verdict is None or self._has_begun:
            # The test that runs may have passed the place of the error before.
            self._verdict = asyncio.get_running_loop().create_future()
            self._has_begun = False
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._test_until_fine())

    def forget(self) -> None:
        """End the tests: nothing is known of the model."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._decide(None)

    async def verdict(self) -> str | None:
        """Return the problem, once the test that runs has ended or takes long."""
        verdict = self._verdict
        if verdict is None:
            return self.problem
        with suppress(TimeoutError):
            async with asyncio.timeout(VERDICT_SECONDS):
                return await asyncio.shield(verdict)
        return self.problem

    async def _test_until_fine(self) -> None:
        pause = FIRST_SECONDS
        while (verdict := self._verdict) is not None:
            self._has_begun = True
            problem = await self._tested()
            if verdict is self._verdict:
                self._decide(problem)
            elif not verdict.done():
                verdict.set_result(problem)
            if self._verdict is None:
                return
            pause = FIRST_SECONDS if problem is None else min(2 * pause, MOST_SECONDS)
            await asyncio.sleep(pause)

    async def _tested(self) -> str | None:
        """Test once; return the problem that was found."""
        try:
            async with asyncio.timeout(TEST_SECONDS):
                await self._test()
        except Exception as error:
            log.warning(
                "model %s: a test request failed: %s", self.name, message_of(error)
            )
            return f"a test request failed: {_kind(error)}"
        log.info("model %s: a test request was answered", self.name)
        return None

    def _decide(self, problem: str | None) -> None:
        """Give the verdict to all who wait for it; without one, tests go on."""
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_result(problem)
        if problem is None:
            self._verdict = None
        self._set(problem)

    def _set(self, problem: str | None) -> None:
        if problem != self.problem:
            self.problem = problem
            self._changed(problem)
