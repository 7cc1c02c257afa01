"""Limits how long torch's threads spin at barriers; imported before torch.

With GNU OpenMP a thread that has finished spins at the barrier for milliseconds. If
another process occupies one of the cores, the spinning thread keeps the other from
running, and decoding falls from 36 to 3 tokens/s.
"""

from __future__ import annotations

import os

SPIN_COUNT = "3000"
USER_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables with which a user chooses the policy; then nothing is changed."""


def limit_spinning() -> None:
    """Set GOMP_SPINCOUNT, unless the environment chooses a wait policy."""
    if not any(name in os.environ for name in USER_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


limit_spinning()
