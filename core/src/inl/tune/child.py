"""The process that tries ways: requests in, one JSON line each; answers out.

``{"do": "open" | "time" | "check", ...}``. An exception is an answer; a crash is the
end of the process, and a hang that of the other side's patience.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from inl.errors import InlError, NoKernel, RequestError
from inl.tune.trials import Trials, Wanted


def main() -> None:
    """Answer until standard input ends."""
    # Whatever a compiler prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    trials: Trials | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                trials, answer = _open(request)
            else:
                assert trials is not None, "the first request opens"
                answer = _try(trials, request)
        except Exception as error:
            said = str(error).strip() or type(error).__name__
            answer = {
                "error": f"{type(error).__name__}: {said.splitlines()[0][:300]}",
                "ours": isinstance(error, InlError),
                "refused": isinstance(error, (NoKernel, RequestError)),
                "broken": trials is not None and not trials.healthy(),
            }
        print(json.dumps(answer), file=answers, flush=True)


def _open(request: dict[str, Any]) -> tuple[Trials, dict[str, Any]]:
    given = {name: _tuples(value) for name, value in request["wanted"].items()}
    trials = Trials(Wanted(**given), request["seed"])
    tasks = [
        {
            "work": call.work._asdict(),
            "kernel": trials.tunable.kernel(call.spec.name, axes[0][0]).label,
            "plain": trials.kernel(place, {}).label,
            "axes": [[dict(config) for config in axis] for axis in axes],
        }
        for place, call in enumerate(trials.calls)
        if (axes := trials.axes(call))
    ]
    return trials, {"facts": trials.tunable.facts()._asdict(), "tasks": tasks}


def _try(trials: Trials, request: dict[str, Any]) -> dict[str, Any]:
    place, config = request["task"], request["config"]
    if request["do"] == "time":
        return {"seconds": trials.seconds(place, config)}
    verdict = trials.verdict(place, config, request["seed"])
    return {"passed": bool(verdict.passed), "verdict": str(verdict)}


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
