"""Entry point of ``inl``: runs a command and maps exceptions to exit codes.

0: success. 1: an unexpected error or a closed output pipe. 2: a usage error or one of
:mod:`inl.errors`. 130: Ctrl-C.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inl.errors import InlError, MissingPackage
from inl.install_command import install_command


def main(args: Sequence[str] | None = None) -> int:
    """Run ``inl`` with ``args`` (default: ``sys.argv``) and return the exit code."""
    _restore_streams()
    words, debug = _extract_debug_flag(list(sys.argv[1:] if args is None else args))
    try:
        with _log_on_stderr(debug):
            try:
                code = _run(words)
            finally:
                _stop_bars()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 1
    except InlError as error:
        _print_error(error, debug)
        return 2
    except Exception as error:
        if isinstance(error, OSError) and _is_full_output(error):
            _discard_output()
            print(f"inl: standard output: {error.strerror}", file=sys.stderr)
            return 1
        _print_error(error, debug)
        if not debug:
            print("inl: run again with --debug for the traceback", file=sys.stderr)
        return 1
    return code


def _is_full_output(error: OSError) -> bool:
    """Whether a write to standard output failed: only streams have no file name."""
    return error.errno == errno.ENOSPC and error.filename is None


def _discard_output() -> None:
    """Send what the interpreter flushes at exit to os.devnull: it would raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop_bars() -> None:
    """Restore the terminal if a command left a progress bar running."""
    if progress := sys.modules.get("inl.cli.progress"):
        progress.stop_bars()


def _restore_streams() -> None:
    """Replace standard streams that were closed before start with os.devnull.

    Letters that the encoding of an output does not have are replaced.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _run(words: list[str]) -> int:
    try:
        from inl.cli.app import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "inl":
            raise
        raise MissingPackage(
            "the command line needs typer and rich; try: "
            + install_command("inl-core[cli]")
        ) from error
    return run(words)


def _extract_debug_flag(words: list[str]) -> tuple[list[str], bool]:
    """Remove ``--debug`` from anywhere before a bare ``--``."""
    end = words.index("--") if "--" in words else len(words)
    remaining = [word for word in words[:end] if word != "--debug"]
    requested = len(remaining) < end or os.environ.get("INL_DEBUG", "0") not in (
        "",
        "0",
    )
    return remaining + words[end:], requested


@contextmanager
def _log_on_stderr(debug: bool) -> Iterator[None]:
    log = logging.getLogger("inl")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("inl: %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _print_error(error: Exception, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exception(error)
    missing = isinstance(error, MissingPackage)
    kind = "" if missing else f"{type(error).__name__}: "
    print(f"inl: {kind}{error}", file=sys.stderr)
