"""Progress of ``inl check``: the current check on a terminal, lines in a log."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from inl.testing.check import Result


class CheckProgress:
    """Shows results on ``stream`` as they arrive.

    A group is the checks of one op, or those of a section whose names share their first
    part. In a log each failure is a line too: a run may be killed before its report.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._group = ""
        self._results: list[Result] = []

    def __call__(self, result: Result) -> None:
        """Show one more result."""
        if self._stream.isatty():
            self._write(f"\r\033[K{result.section}: {result.name}")
            return
        group = f"{result.section}: {result.name.partition('/')[0]}"
        if group != self._group:
            self.close()
        self._group = group
        self._results.append(result)
        if result.status == "failed":
            self._write(f"failed  {result.name}: {result.message}\n")

    def close(self) -> None:
        """End the line, or write that of the last group."""
        if self._stream.isatty():
            self._write("\r\033[K")
        elif self._results:
            failed = sum(each.status == "failed" for each in self._results)
            seconds = sum(each.seconds for each in self._results)
            passed = len(self._results) - failed
            self._write(
                f"{self._group}, {passed} passed, {failed} failed, {seconds:.1f} s\n"
            )
        self._results = []

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
