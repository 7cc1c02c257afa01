"""Child process that measures kernel configs; reads requests, writes replies.

Requests and replies are JSON objects, one a line: ``{"do": "open" | "time" | "check",
...}``. An exception becomes an error reply; the parent detects crashes and hangs
(:class:`~inl.tune.process.Child`).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from inl.errors import InlError, NoKernel, RequestError
from inl.tune.trials import Trials, TuningOptions


def main() -> None:
    """Reply to requests until standard input ends."""
    # Compilers may print to stdout: file descriptor 1 becomes stderr, and replies go
    # to a copy of the original.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    trials: Trials | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                trials, reply = _open(request)
            else:
                assert trials is not None, "the first request opens"
                reply = _run(trials, request)
        except Exception as error:
            reply = _error_reply(error, trials)
        print(json.dumps(reply), file=replies, flush=True)


def _error_reply(error: Exception, trials: Trials | None) -> dict[str, Any]:
    message = str(error).strip() or type(error).__name__
    return {
        "error": f"{type(error).__name__}: {message.splitlines()[0][:300]}",
        "ours": isinstance(error, InlError),
        "refused": isinstance(error, (NoKernel, RequestError)),
        "broken": trials is not None and not trials.healthy(),
    }


def _open(request: dict[str, Any]) -> tuple[Trials, dict[str, Any]]:
    fields = {name: _to_tuple(value) for name, value in request["options"].items()}
    trials = Trials(TuningOptions(**fields), request["seed"])
    tasks = [
        {
            "work": call.work._asdict(),
            "kernel": trials.tunable.kernel(call.spec.name, axes[0][0]).label,
            "default_kernel": trials.kernel(index, {}).label,
            "axes": [[dict(config) for config in axis] for axis in axes],
        }
        for index, call in enumerate(trials.calls)
        if (axes := trials.axes(call))
    ]
    return trials, {"facts": trials.tunable.facts()._asdict(), "tasks": tasks}


def _run(trials: Trials, request: dict[str, Any]) -> dict[str, Any]:
    index, config = request["task"], request["config"]
    if request["do"] == "time":
        return {"seconds": trials.seconds(index, config)}
    verdict = trials.verdict(index, config, request["seed"])
    return {"passed": bool(verdict.passed), "verdict": str(verdict)}


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
