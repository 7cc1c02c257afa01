"""Prints the functions of INL that one ``inl generate`` calls, as JSON: file, name.

Run as a script, in a process of its own. All threads are traced. What a process does
once is left out: importing, opening and closing the model and the engine. So are
constructors, which are called where an object is made, not where it takes part.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from types import FrameType

ONCE = {
    "<module>",
    "check_place",
    "resolve_model",
    "open_model",
    "InferenceEngine.__init__",
    "InferenceEngine.close",
}
"""Functions that are left out, with what they call and the threads that they start."""
MAKING = ("__init__", "__post_init__", "__new__")


class Calls:
    """A profile function that records calls of functions of ``folders``."""

    def __init__(self, folders: list[Path]) -> None:
        self.found: list[tuple[str, str]] = []
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._threads = threading.local()
        self._frame: FrameType | None = None
        self._main = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Record a call, unless :data:`ONCE` runs or started this thread."""
        if threading.get_ident() != self._main:
            if not hasattr(self._threads, "left_out"):
                self._threads.left_out = self._frame is not None
            if self._threads.left_out:
                return
        elif self._frame is not None:
            if event == "return" and frame is self._frame:
                self._frame = None
            return
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._folders):
            return
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a class
        if code.co_qualname in ONCE and threading.get_ident() == self._main:
            self._frame = frame
        elif is_function and not code.co_name.startswith(("<", *MAKING)):
            self.found.append((code.co_filename, code.co_qualname))


def main() -> None:
    import inl
    import inl_cpu
    from inl.cli.main import main as inl_main

    calls = Calls([Path(package.__file__).parent for package in (inl, inl_cpu)])
    output, *sys.argv[1:] = sys.argv[1:]
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        code = inl_main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    Path(output).write_text(json.dumps(calls.found))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
