"""Queue of images: encoded several at a time, in parts between the decoder's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inl.engine.encoder_load import EncoderLoad
from inl.engine.fair_lock import FairLock
from inl.executor.encoder_executor import MAX_SEQUENCES
from inl.executor.vision_encoder import sequences_of
from inl.forks import on_fork

if TYPE_CHECKING:
    from inl.engine.dispatcher import RequestDispatcher
    from inl.executor.vision_encoder import EncodedImage, ImageBatch, VisionEncoder
    from inl.images.qwen_patches import Patches

LEAST_SECONDS: Final = 0.005
MOST_SECONDS: Final = 0.05
"""Bounds of the time that parts take in a turn, which is that of the steps between."""


@dataclass(slots=True, eq=False)
class QueuedImage:
    """An image and, once it is encoded, its features or an error."""

    patches: Patches = field(repr=False)
    digest: bytes
    result: EncodedImage | None = field(default=None, repr=False)
    error: Exception | None = None
    dropped: bool = False
    """Whether the caller has given up: it need not be computed."""

    @property
    def done(self) -> bool:
        """Whether it has features or an error."""
        return self.result is not None or self.error is not None


class Pace:
    """How many parts of a batch fit into a turn. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = clock()
        """When the last turn ended."""
        self._patches = 0
        """Of this batch."""
        self._per_part = 0.0
        """Least seconds of a part of this batch; 0 before its first turn."""

    @property
    def most_patches(self) -> int:
        """Patches whose parts take :data:`MOST_SECONDS`, by those of the last batch.

        0 before there was one: its first image is then alone.
        """
        if not self._per_part:
            return 0
        return int(self._patches * MOST_SECONDS / self._per_part)

    def begin_batch(self, patches: int) -> None:
        """Forget the time of a part, which depends on the batch."""
        self._patches, self._per_part = patches, 0.0

    def run(self, advance: Callable[[int], None]) -> None:
        """Compute parts, for as long as the steps since the last turn have taken.

        At least one, and one only in the first turn of a batch.
        """
        began = self._clock()
        seconds = min(max(began - self._left, LEAST_SECONDS), MOST_SECONDS)
        parts = max(int(seconds / self._per_part), 1) if self._per_part else 1
        advance(parts)
        self._left = self._clock()
        # The first turn may compile, and a device may finish a step before a part: the
        # least time is that of the parts alone.
        taken = max((self._left - began) / parts, 1e-9)
        self._per_part = min(self._per_part or taken, taken)


class ImageQueue:
    """Encodes images in the order in which they come, several in a program.

    A turn computes parts of a program, and a step of the decoder is between two turns
    while requests are open. Thread-safe: the threads that wait compute what all wait
    for, one at a time. is_beside: whether the encoder has a device of its own, whose
    turns are not those of steps. load: returns the encoder, in a turn. budget: most
    patches of the images of a program, beside one image of more; fewer where a part of
    as many would take longer than :data:`MOST_SECONDS`.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, load: Callable[[], VisionEncoder], *,
        budget: int, is_beside: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.budget, self.is_beside = budget, is_beside
        self.lock = FairLock() if is_beside else dispatcher.lock
        """Held in turns."""
        self._dispatcher, self._load = dispatcher, load
        self._pace = Pace(clock)
        self._turns = FairLock()
        """Around a turn and the step after it: one thread at a time drives."""
        self._waiting: deque[QueuedImage] = deque()
        self._batch: ImageBatch | None = None
        self._images: list[QueuedImage] = []
        """Of the batch."""
        self.counts = EncoderLoad(lambda: len(self._waiting))
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Leave the images of the parent's other threads to it."""
        self._waiting.clear()
        self._batch, self._images = None, []

    @property
    def waiting_patches(self) -> int:
        """Patches of the images that wait for a program."""
        return sum(len(each.patches.values) for each in list(self._waiting))

    def make_room(self, patches: int) -> None:
        """Encode queued images until ``patches`` more fit into the queue's budget."""
        while (waiting := self.waiting_patches) and waiting + patches > self.budget:
            self._drive()

    def encode(self, images: Sequence[QueuedImage]) -> list[EncodedImage]:
        """Return the features of images; raises the error of the first."""
        self.counts.cache_hits += sum(each.done for each in images)
        self._waiting.extend(each for each in images if not each.done)
        try:
            while not all(each.done for each in images):
                self._drive()
        finally:
            for each in images:
                each.dropped = True
        results = []
        for each in images:
            if each.error is not None:
                raise each.error
            assert each.result is not None, "it is done"
            results.append(each.result)
        return results

    def _drive(self) -> None:
        self._turns.run(self._turn_and_step)

    def _turn_and_step(self) -> None:
        """Take a turn, then let the decoder have one too."""
        steps = self.lock.run(self._turn)
        if steps is not None and not self.is_beside:
            self._dispatcher.step_after(steps)

    def _turn(self) -> int | None:
        """Compute parts of what waits; returns the steps so far, ``None`` for no work.

        The caller holds :attr:`lock`.
        """
        if all(each.dropped for each in self._images):
            self._batch, self._images = None, []
        try:
            encoder = self._load()
            if self._batch is None:
                self._begin(encoder)
            if self._batch is None:
                return None
            with self.counts.computing():
                self._pace.run(self._batch.encoding.advance)
            if self._batch.encoding.is_done:
                self._finish(encoder, self._batch)
        except Exception as error:
            # Whatever a backend raises reaches those who wait for its results.
            for each in self._images or self._waiting:
                each.error = error
            if not self._images:
                self._waiting.clear()
            self._batch, self._images = None, []
        except BaseException:
            # Interrupted: the next turn begins the batch again.
            self._waiting.extendleft(reversed(self._images))
            self._batch, self._images = None, []
            raise
        return self._dispatcher.steps

    def _begin(self, encoder: VisionEncoder) -> None:
        """Begin a batch of the first images that fit into a program."""
        self._images = []
        distinct: dict[bytes, Patches] = {}
        patches = budget = min(self.budget, self._pace.most_patches)
        rows = MAX_SEQUENCES
        while self._waiting:
            first = self._waiting[0]
            if first.dropped:
                self._waiting.popleft()
                continue
            first.result = encoder.cached(first.digest)
            if first.result is not None:
                self.counts.cache_hits += 1
                self._waiting.popleft()
                continue
            if first.digest not in distinct:
                patches -= len(first.patches.values)
                rows -= sequences_of(encoder.vision, first.patches)
                if distinct and min(patches, rows) < 0:
                    break
                distinct[first.digest] = first.patches
            self._images.append(first)
            self._waiting.popleft()
        if distinct:
            images = [(each, digest) for digest, each in distinct.items()]
            self._batch = encoder.begin(images)
            self._pace.begin_batch(budget - patches)

    def _finish(self, encoder: VisionEncoder, batch: ImageBatch) -> None:
        found = {each.digest: each for each in batch.results()}
        self.counts.computed(len(found))
        for image in found.values():
            encoder.keep(image)
        for each in self._images:
            each.result = found[each.digest]
        self._batch, self._images = None, []
