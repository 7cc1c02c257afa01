"""Images in a queue: turns between steps, shared programs, errors."""

from __future__ import annotations

import numpy as np
import pytest

from inl.engine.fair_lock import FairLock
from inl.engine.image_queue import ImageQueue, Pace, QueuedImage
from inl.executor.vision_encoder import EncodedImage
from inl.images.qwen_patches import Patches


class Clock:
    """Time that only the work of a test takes."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("step", "part", "expected"),
    [
        (0.02, 0.004, 5),
        (0.02, 0.5, 1),  # a part that is longer than a step is a turn of its own
        (0.0, 0.001, 5),  # nobody decodes: at least 5 ms
        (9.0, 0.01, 5),  # a long prompt was computed: at most 50 ms
    ],
)
def test_a_turn_takes_as_long_as_the_steps_between(step, part, expected):
    clock, turns = Clock(), []
    pace = Pace(clock)

    def advance(parts):
        turns.append(parts)
        clock.now += parts * part * 1.0001

    def first(parts):
        clock.now += 3 * parts  # compiles

    pace.begin_batch(100)
    pace.run(first)
    for _ in range(3):
        clock.now += step
        pace.run(advance)
    assert turns[0] == 1
    assert turns[2] in (expected, expected - 1)
    assert pace.most_patches == pytest.approx(100 * 0.05 / part, rel=0.01, abs=1)


class Dispatcher:
    """Counts steps, as if a request were always open."""

    def __init__(self, events):
        self.lock, self.steps, self.events = FairLock(), 0, events

    def step_after(self, steps):
        if self.steps == steps:
            self.steps += 1
            self.events.append("step")


class Batch:
    """A batch of two parts."""

    def __init__(self, images, events, error):
        self.images, self.events, self.error = images, events, error
        self.encoding, self.left = self, 2

    @property
    def is_done(self):
        return not self.left

    def advance(self, parts):
        if self.error is not None:
            raise self.error
        self.left -= parts
        self.events.append(len(self.images))

    def results(self):
        row = np.zeros((1, 4), np.float32)
        return [
            EncodedImage(row, (1, 1), (1,), digest, row[:, None])
            for _, digest in self.images
        ]


class Vision:
    settings = None


class Encoder:
    """Keeps features, and begins batches that fail if told so."""

    vision = Vision()

    def __init__(self, events):
        self.events, self.error, self.kept = events, None, {}

    def begin(self, images):
        return Batch(images, self.events, self.error)

    def cached(self, digest):
        return self.kept.get(digest)

    def keep(self, image):
        self.kept[image.digest] = image


@pytest.fixture
def made():
    events = []
    encoder, clock = Encoder(events), Clock()

    def ticking():
        clock.now += 0.02
        return clock.now

    queue = ImageQueue(
        Dispatcher(events), lambda: encoder, budget=100, clock=ticking
    )  # fmt: skip
    return queue, encoder, events


def images_of(*sizes, name="image"):
    return [
        QueuedImage(
            Patches(np.zeros((size, 3), np.float32), (1, size)),
            f"{name} {number}".encode(),
        )
        for number, size in enumerate(sizes)
    ]


def test_images_share_programs_within_the_budget(made):
    queue, _, events = made
    results = queue.encode(images_of(60, 40, 1, 400, 99))
    assert [each.digest for each in results] == [b"image %d" % n for n in range(5)]
    # Of two parts each: the first alone, whose time is not known, 40 + 1 patches, 400
    # of one image, and 99.
    alone, both = [1, "step", 1, "step"], [2, "step", 2, "step"]
    assert events == [*alone, *both, *alone, *alone]


def test_images_are_alone_where_a_part_takes_long(made):
    queue, _, events = made
    queue.encode(images_of(60))
    slow = Clock()

    def ticking():
        slow.now += 2.0
        return slow.now

    queue._pace = Pace(ticking)
    queue.encode(images_of(1, 9, 9, name="slow"))
    assert [each for each in events if each != "step"] == [1] * 8


def test_equal_images_are_encoded_once(made):
    queue, _, events = made
    images = images_of(10) + images_of(10) + images_of(10, name="other")
    results = queue.encode(images)
    assert results[0] is results[1]
    assert results[2].digest == b"other 0"
    assert [each for each in events if each != "step"] == [1] * 4
    assert queue.encode(images_of(10))[0] is results[0]
    assert len([each for each in events if each != "step"]) == 4


def test_an_error_reaches_those_of_its_batch_only(made):
    queue, encoder, _ = made
    encoder.error = ValueError("out of memory")
    first, later = images_of(100), images_of(100, name="later")
    queue._waiting.extend(later)
    with pytest.raises(ValueError, match="out of memory"):
        queue.encode(first)
    assert later[0].error is not None  # it was before
    encoder.error = None
    assert queue.encode(images_of(100))[0].digest == b"image 0"


def test_an_interrupted_turn_is_repeated(made):
    queue, encoder, _ = made
    encoder.error = KeyboardInterrupt()
    other = images_of(10, name="other")
    queue._waiting.extend(other)
    with pytest.raises(KeyboardInterrupt):
        queue.encode(images_of(10))
    encoder.error = None
    queue.encode(images_of(10, name="third"))
    assert other[0].result is not None
    assert not queue._waiting


def test_there_is_room_for_one_more_image_than_the_budget(made):
    """The patches that wait are bounded, whatever number of threads prepare them."""
    queue, encoder, _ = made
    waiting = images_of(60, 30)
    queue._waiting.extend(waiting)
    queue.make_room(10)
    assert queue.waiting_patches == 90
    queue.make_room(11)
    assert queue.waiting_patches == 30
    queue.make_room(1000)
    assert queue.waiting_patches == 0
    assert list(encoder.kept) == [b"image 0"]  # the other one has begun
