"""Random steps of ranks without tensors, every text checked, and the time they take.

    python bench/hash_steps.py --steps 1000000 --processes 16

The ranks of pipelines (each sequence in a lane), and those that divide the rows, are
hash runners: a token is a hash of all ids read through the block table, so that a frame
that is skipped, doubled, or goes to another lane, slot or rank changes a text. Requests
arrive, are cancelled, preempted and interrupted at random, with prefix hits, drafts,
grammars, adapters and pooled ones, and each answer is compared with an oracle that has
no cache and no scheduler. An interrupt resets the runner with steps in flight. Exits
with 1 after a wrong text. The faults that these tests find are planted in
``tests/core/runners/test_stages.py`` and ``tests/core/placement/test_data_ranks.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from hash_rows import HashRows
from hash_stages import HashPipeline
from inl.speculation.planner import Speculation
from soak import Parts, soak

KINDS: dict[str, dict[str, Any]] = {
    "pipeline=2": {"runner": HashPipeline, "stages": 2},
    "pipeline=3": {"runner": HashPipeline, "stages": 3},
    "pipeline=2, drafts": {
        "runner": HashPipeline, "stages": 2, "speculation": Speculation,
    },
    "pipeline=2, adapters": {
        "runner": HashPipeline, "stages": 2, "adapters": True, "pooled": True,
    },
    "data=2": {"runner": HashRows, "data_ranks": 2},
    "data=3, drafts": {
        "runner": HashRows, "data_ranks": 3, "speculation": Speculation,
    },
}  # fmt: skip
SHOWN = (
    "steps", "requests", "preemptions", "cancelled", "resets", "prefix hit tokens",
    "accepted drafts", "guided requests", "adapters", "hidden states",
)  # fmt: skip


def run(case: tuple[str, int, int]) -> tuple[str, Counter[str] | str]:
    """Run steps of one kind; returns the counts, or the error."""
    name, seed, steps = case
    parts = Parts(resets=0.01, **KINDS[name])
    try:
        return name, soak(seed, steps, parts, world_steps=300)
    except Exception as error:
        return name, f"seed {seed}: {type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    parts = max(given.processes // len(KINDS), 1)
    each = -(-given.steps // (parts * len(KINDS)))
    cases = [(name, given.seed + n, each) for n in range(parts) for name in KINDS]
    began, totals, wrong = time.perf_counter(), {}, 0
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for name, found in pool.imap_unordered(run, cases):
            if isinstance(found, str):
                print(f"{name}: {found}", flush=True)
                wrong += 1
            else:
                totals.setdefault(name, Counter()).update(found)
    for name, counts in totals.items():
        print(f"{name}: " + ", ".join(f"{counts[n]:,} {n}" for n in SHOWN if counts[n]))
    steps = sum(counts["steps"] for counts in totals.values())
    seconds = time.perf_counter() - began
    print(f"{steps:,} steps in {seconds:.0f} s with {given.processes} processes, "
          f"{wrong} of {len(cases)} runs with a wrong text")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
