"""A pipeline of hash runners: the text depends on what every stage has cached."""

from __future__ import annotations

import threading
from random import Random

from inl.errors import ProtocolError, RunnerError
from inl.runners.group_runner import RankRunner
from inl.testing.hash_runner import HashRunner

SECONDS = 20


class Exchange:
    """Messages between stages, by their key."""

    def __init__(self):
        self.messages, self.changed = {}, threading.Condition()
        self.is_aborted = False

    def put(self, key, value):
        with self.changed:
            assert key not in self.messages, key
            self.messages[key] = value
            self.changed.notify_all()

    def take(self, key):
        with self.changed:
            ready = lambda: key in self.messages or self.is_aborted  # noqa: E731
            if not self.changed.wait_for(ready, SECONDS) or self.is_aborted:
                raise RunnerError(f"stages: nothing was sent for {key}")
            return self.messages.pop(key)

    def abort(self):
        with self.changed:
            self.is_aborted = True
            self.changed.notify_all()


class HashStage(HashRunner):
    """A stage that caches tokens and sends what it has read to the last one."""

    def __init__(self, limits, exchange, index):
        super().__init__(limits)
        self.exchange, self.index = exchange, index

    def _compute_rows(self, steps):
        for step in steps:
            step.needs_masks = False
            for task in step.rows:
                if not task.done:
                    self._compute(task)

    def _compute(self, task):
        if -1 in task.row.tokens and not task.step.bucket.verifies:
            raise ProtocolError("a stage that samples no tokens has none to feed back")
        super()._compute(task)

    def _sample_token(self, task, sample, number):
        state, step = task.state, task.step
        total = self.cells.total(task.tables, state.cached)
        self.exchange.put((self.index, step.number, sample), total)
        if not step.bucket.verifies:
            return 0
        return self.exchange.take((self.index, step.number, sample, "token"))

    def _sample(self, flight, masks):
        pass


class LastHashStage(HashRunner):
    """The stage that samples: another token where a stage has read something else."""

    def __init__(self, limits, exchange, stages, lag):
        super().__init__(limits, lag=lag)
        self.exchange, self.stages = exchange, stages

    def _compute_rows(self, steps):
        # Other stages wait in a step that verifies, and send nothing for later ones.
        for step in steps:
            if step.bucket.verifies and not step.needs_masks:
                for task in step.rows:
                    while not task.done:
                        self._compute(task.state.queue[0])
        super()._compute_rows(steps)

    def _sample_token(self, task, sample, number):
        state, step = task.state, task.step
        token = super()._sample_token(task, sample, number)
        mine = self.cells.total(task.tables, state.cached)
        for index in range(self.stages - 1):
            theirs = self.exchange.take((index, step.number, sample))
            if theirs != mine:
                token = (token + 1) % self.limits.vocab
        if step.bucket.verifies:
            for index in range(self.stages - 1):
                self.exchange.put((index, step.number, sample, "token"), token)
        return token

    def _reset(self):
        for flight in self._in_flight:  # other stages may wait for the tokens
            for task in flight.work.rows:
                if not task.done:
                    self._compute(task)
        super()._reset()


class HashPipeline:
    """Runner of a group of stages, as :class:`HashRunner`."""

    def __init__(self, limits, *, lag=None):
        self.exchange, count = Exchange(), limits.stages
        own = None if lag is None else Random(repr(limits))

        def make(index):
            if index < count - 1:
                return HashStage(limits, self.exchange, index)
            return LastHashStage(limits, self.exchange, count, own)

        self.group = RankRunner(make, count, abort=self.exchange.abort, stages=count)

    def __getattr__(self, name):
        return getattr(self.group, name)

    @property
    def slots_in_use(self):
        self.group._last_round.wait()  # releases are sent without waiting for them
        return sorted({slot for one in self.group.runners for slot in one.slots_in_use})
