"""Child process that imports one framework: ``python import_child.py MODULE KEY``.

Prints why the import fails, on one line, or nothing. Stores that under the key, for
:mod:`inl.plugin.frameworks`, but for a failure that the parent waited for: its cause
may be mended. Imports nothing of INL before the framework, since the parent waits.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress
from importlib import import_module

LIMIT_SECONDS = 60.0
MOST_CHARACTERS = 400


def main(module: str, key: str) -> None:
    """Import ``module``; print and store the result."""
    reply = os.dup(1)
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    reason = ""
    try:
        import_module(module)
    except BaseException as error:
        text = " ".join(str(error).split())[:MOST_CHARACTERS]
        reason = f"{type(error).__name__}: {text}"
    if not reason or not delivered(reply, reason):
        os.close(reply)
        with suppress(Exception):
            from inl.plugin.private_facts import write_facts

            write_facts(key, {"reason": reason})
    # Threads and exit handlers of the framework do not run: they may hang.
    os._exit(0)


def delivered(reply: int, reason: str) -> bool:
    """Print a reason; return whether the parent still waits for it."""
    try:
        os.write(reply, reason.encode("utf-8", "replace"))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
