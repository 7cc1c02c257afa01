"""Compiles hostile grammars and walks through them; prints a line of JSON for each.

Run as ``hostile_worker.py FIRST LAST``, the numbers of the grammars. What happened is
``compiled``, ``refused`` (an error of ours, with its message) or ``odd`` (another one).
It is a process of its own: its crash is a failure of the test.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from random import Random

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "support"))

from hostile_grammars import hostile_grammar
from inl.errors import RequestError
from inl.guidance.grammars import Grammars
from plain_byte_tokens import plain_bytes_as_tokens

STEPS = 8
STATUS = Path("/proc/self/status")


def memory():
    """Resident memory in bytes; 0 where the system does not report it."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next(
        (int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")), 0
    )


def walk(guide, random):
    """Take random steps; returns the longest processor time of one."""
    longest = 0.0
    for _ in range(STEPS):
        if guide.is_complete:
            break
        began = time.thread_time()
        mask = guide.masks()[0]
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not allowed.size:  # only an end token, which this vocabulary lacks
            break
        guide.advance(int(random.choice(allowed)))
        longest = max(longest, time.thread_time() - began)
    return longest


def try_one(grammars, seed):
    kind, structured = hostile_grammar(seed)
    began, step = time.process_time(), 0.0
    try:
        guide = grammars.guide(structured)
        result, message = "compiled", ""
    except RequestError as error:
        result, message = "refused", str(error)
    except BaseException as error:
        result, message = "odd", repr(error)
    seconds = time.process_time() - began
    if result == "compiled":
        try:
            step = walk(guide, Random(seed))
        except RequestError as error:  # a bound of the library's steps
            message = str(error)
    return {
        "seed": seed, "kind": kind, "result": result, "message": message[:500],
        "seconds": seconds, "step": step, "memory": memory(),
    }  # fmt: skip


def main(first, last):
    tokenizer = plain_bytes_as_tokens()
    grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size, [], 1 << 20)
    for seed in range(first, last):
        print(json.dumps(try_one(grammars, seed)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
