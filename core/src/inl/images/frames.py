"""Frames of a video in one data URI, as clients send them: images after each other."""

from __future__ import annotations

from typing import Final

START: Final = "data:video/"
FORMATS: Final = ("jpeg", "png", "webp")
"""Formats of frames."""
MAX_FRAMES: Final = 256
"""Most images of a prompt, see :mod:`inl.engine.prompt_images`."""
ACCEPTED: Final = (
    "frames: data:video/jpeg;base64,FRAME,FRAME or a list of images in 'video'"
)
"""What is accepted of a video."""


def frame_uris(url: str) -> list[str] | None:
    """Return the data URI of each frame, ``None`` for anything but frames.

    url: ``data:video/jpeg;base64,FRAME,FRAME`` and so on. More than
    :data:`MAX_FRAMES` and one are not separated: the count is refused later.
    """
    head, comma, _ = url[: len(START) + 20].partition(",")
    kind, _, coding = head.removeprefix(START).lower().partition(";")
    if not head.startswith(START) or coding != "base64" or kind not in FORMATS:
        return None
    parts = url[len(head) + len(comma) :].split(",", MAX_FRAMES + 1)
    return [f"data:image/{kind};base64,{part}" for part in parts]
