"""How torch's threads wait for each other; set before torch is imported.

GNU OpenMP lets a thread that is done spin at the barrier for milliseconds. Where
another process has taken one of the cores, the spinner keeps the other thread from
running, and decoding falls from 36 to 3 tokens/s.
"""

from __future__ import annotations

import os

SPINS = "3000"
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables with which a user has chosen already."""


def wait_briefly() -> None:
    """Shorten the spin, unless the environment says how to wait."""
    if not any(name in os.environ for name in CHOSEN):
        os.environ["GOMP_SPINCOUNT"] = SPINS


wait_briefly()
