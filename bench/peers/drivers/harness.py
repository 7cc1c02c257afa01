"""What every driver does with its peer, so that all are timed by the same code.

A driver gives ``load(job) -> answer``, and ``answer(prompts, tokens) -> Answered``
runs prompts of equal length at once, greedily and past end tokens. Only the standard
library is imported here: this runs in the peer's environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Answered(NamedTuple):
    """What came back."""

    ids: list[list[int]]
    first_seconds: float | None = None
    """From the call to the first token, where the peer tells."""


Answer = Callable[[list[list[int]], int], Answered]


class Facts(NamedTuple):
    """What a report says of a peer."""

    versions: dict[str, str]
    mode: str
    """In words: what the peer computes in, and with what settings."""
    weight_bytes: int | None = None
    """Bytes of weights that a token reads, where the peer itself can tell."""


class Loaded(NamedTuple):
    """A peer that is ready to answer."""

    answer: Answer
    facts: Callable[[], Facts]
    """Called after all is measured, for a peer must not wait for it to be ready."""
    close: Callable[[], None] = lambda: None
    own_memory: Callable[[], int] | None = None
    """Peak bytes, where the peer is not this process but a child of it."""
    is_serial: bool = False
    """Whether it runs the requests of a batch one after the other. Larger batches then
    have the rate of the smallest, and are not measured."""
    started: Callable[[], float] | None = None
    """When the peer's own process began, by ``time.time``."""


class Prompts:
    """Prompts of random tokens, never the same twice: no cached prefix can help."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._vocabulary = vocabulary

    def take(self, count: int, length: int) -> list[list[int]]:
        """Draw ``count`` prompts; low ids are left out, they are often special."""
        low = min(256, self._vocabulary // 2)
        return [
            [self._draw.randrange(low, self._vocabulary) for _ in range(length)]
            for _ in range(count)
        ]


def main(load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Run the job named on the command line and print a line of JSON.

    A job of turns prints one when it is ready and one for each turn.
    """
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    out = _keep_stdout()
    limit_cores(job["threads"])
    loaded = load(job)
    try:
        reports = take_turns(job, loaded) if job["turns"] else [measure(job, loaded)]
        for report in reports:
            print(json.dumps(report), file=out, flush=True)
    finally:
        loaded.close()
    os._exit(0)  # some peers' threads abort at exit; the answer is out


def measure(job: dict[str, Any], loaded: Loaded) -> dict[str, Any]:
    """Time every column of the table, each as the median of ``repeats`` calls."""
    prompts = Prompts(job["vocabulary"], job["seed"])
    answer, repeats = loaded.answer, job["repeats"]
    check(answer(prompts.take(1, 32), 1), 1, 1)
    ready = time.time() - (loaded.started() if loaded.started else job["started"])
    if job["only_start"]:
        return {"ready_seconds": ready}
    said = answer([job["question"]], job["question_tokens"]).ids[0]
    first = _median(repeats, lambda: timed(answer, prompts.take(1, 32), 1))
    answer(prompts.take(1, 512), 1)  # the first of a shape may compile
    long = _median(repeats, lambda: timed(answer, prompts.take(1, 512), 1))
    rates = {
        "ready_seconds": ready,
        "first_token_ms": 1000 * first,
        "prefill_rate": 512 / long,
        "decode_rate": _median(
            repeats, lambda: decode_rate(answer, prompts, job["tokens"], first)
        ),
    }
    peak = loaded.own_memory or tree_peak_bytes
    alone = peak()
    for batch in job["batches"]:
        if loaded.is_serial and batch != job["batches"][0]:
            rates[f"c{batch}_rate"] = rates[f"c{job['batches'][0]}_rate"]
            continue
        tokens = job["batch_tokens"]
        answer(prompts.take(batch, 16), 2)
        seconds = _median(
            job["batch_repeats"],
            lambda b=batch: timed(answer, prompts.take(b, 128), job["batch_tokens"]),
        )
        rates[f"c{batch}_rate"] = batch * tokens / seconds
    return {
        **rates,
        "alone_mb": _megabytes(alone),
        "peak_mb": _megabytes(peak()),
        "said": said,
        **loaded.facts()._asdict(),
    }


def take_turns(job: dict[str, Any], loaded: Loaded) -> Iterator[dict[str, float]]:
    """Report that the peer is ready, then decode and prefill for each line of input.

    Where the peer does not tell when the first token came, a call for one token comes
    before each answer.
    """
    prompts, answer = Prompts(job["vocabulary"], job["seed"]), loaded.answer
    got = answer(prompts.take(1, 32), 1)
    check(got, 1, 1)
    yield {}
    for _ in sys.stdin:
        first = 0.0
        if got.first_seconds is None:
            first = timed(answer, prompts.take(1, 32), 1)
        rate = decode_rate(answer, prompts, job["tokens"], first)
        long = timed(answer, prompts.take(1, 512), 1)
        yield {"decode_rate": rate, "prefill_rate": 512 / long}


def _megabytes(count: int | None) -> float | None:
    return count / 1e6 if count else None


def decode_rate(answer: Answer, prompts: Prompts, tokens: int, first: float) -> float:
    """Tokens a second after the first one of an answer of ``tokens`` + 1."""
    began = time.perf_counter()
    got = answer(prompts.take(1, 32), tokens + 1)
    seconds = time.perf_counter() - began
    check(got, 1, tokens + 1)
    before = first if got.first_seconds is None else got.first_seconds
    return tokens / (seconds - before)


def timed(answer: Answer, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of one call, whose answer has to be complete."""
    began = time.perf_counter()
    got = answer(prompts, tokens)
    seconds = time.perf_counter() - began
    check(got, len(prompts), tokens)
    return seconds


def check(got: Answered, count: int, tokens: int) -> None:
    """Raise unless every prompt got all its tokens: a short answer is a fast one."""
    lengths = [len(ids) for ids in got.ids]
    if lengths != [tokens] * count:
        raise RuntimeError(f"answers of {lengths} tokens, asked: {count} of {tokens}")


def ggml_instructions(llama: Path) -> str:
    """Instruction sets that a build of llama.cpp uses here; by its own report."""
    ggml = llama.with_name(llama.name.replace("llama", "ggml"))
    if ggml.exists():
        ctypes.CDLL(str(ggml), mode=ctypes.RTLD_GLOBAL)
    report = ctypes.CDLL(str(llama)).llama_print_system_info
    report.restype = ctypes.c_char_p
    used = re.findall(r"(\w+) = [1-9]", report().decode())
    return f"instructions: {' '.join(used) or 'not reported'}"


def limit_cores(threads: int) -> None:
    """Keep to the first cores, where threads are fewer: pools count cores."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(cores[:threads]))


def tree_peak_bytes(root: int | None = None) -> int | None:
    """Peak resident bytes of a process and its children, each at its own peak.

    Off Linux only this process is known, and ``None`` says that not even that is.
    """
    if not Path("/proc/self/status").exists():
        return _own_peak_bytes()
    return sum(_high_water(each) for each in _family(root or os.getpid()))


def _own_peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _family(root: int) -> Iterator[int]:
    yield root
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))


def _high_water(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _median(repeats: int, run: Callable[[], float]) -> float:
    # Imported after the start, whose time is measured.
    from statistics import median

    return median(run() for _ in range(repeats))


def _keep_stdout() -> Any:
    """Let whatever a peer prints go to stderr, also from its native code."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out
