"""Child process that imports one plugin: ``python -m inl.plugin.screen_child MODULE``.

Prints one JSON object on stdout, for :mod:`inl.plugin.screening`. The plugin's own
output goes to stderr. A watchdog ends the process after the time limit, also if the
parent has gone, and prints where the plugin hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from time import perf_counter
from typing import Any


def main(module: str, seconds: float) -> None:
    """Import ``module``, run its hooks, and print what it registers."""
    reply = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    began = perf_counter()
    facts = _facts(module)
    facts["seconds"] = round(perf_counter() - began, 4)
    os.write(reply, json.dumps(facts).encode())
    # A plugin's threads and exit handlers do not run: they may hang.
    os._exit(0)


def _facts(module: str) -> dict[str, Any]:
    from inl.plugin.loader import load_registry

    try:
        known = load_registry((), [module])
    except KeyboardInterrupt as error:
        return {"reason": f"import raised {type(error).__name__}"}
    entry = sys.modules.get(module.partition(":")[0])
    return {
        "reason": "",
        "backends": [str(kind) for kind in known.claims(module)],
        "kernels": ":" in module or hasattr(entry, "inl_register_kernels"),
        "commands": known.commands(module),
    }


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
