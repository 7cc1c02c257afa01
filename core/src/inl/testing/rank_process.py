"""One rank of a group whose collectives are checked: a process of ``inl check``.

``python -m inl.testing.rank_process JSON`` takes the device, the rank, the seed, the
verbs and a folder; it prints the faults of each verb as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from inl.backend.collectives import Collectives, Rank, Ranks
from inl.device import Device
from inl.plugin import make_backend
from inl.runners.rank_startup import read_rank
from inl.testing.check import CheckFailed
from inl.testing.rank_program import RankCheck, faults


def join_and_check(
    ranks: Ranks, rank: Rank, seed: int, verbs: list[str], folder: Path
) -> dict[str, list[str]]:
    """Join a group and return the faults of each verb on this rank.

    Raises :class:`~inl.testing.check.CheckFailed` for a backend without collectives.
    """
    backend = ranks.joining(rank)
    collectives: Any = backend.offers(Collectives)
    if collectives is None:
        raise CheckFailed(
            "joining: found a backend that does not offer Collectives; return one that "
            "does"
        )
    check = RankCheck(backend, collectives, rank, seed, folder)
    return {verb: list(faults(check, verb)) for verb in verbs}


def main(text: str) -> None:
    """Print the faults of one rank."""
    given = json.loads(text)
    ranks = make_backend(Device(given["device"])).offers(Ranks)
    assert ranks is not None, "checked by the parent"
    found = join_and_check(
        ranks, read_rank(given["rank"]), given["seed"], given["verbs"],
        Path(given["folder"]),
    )  # fmt: skip
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
