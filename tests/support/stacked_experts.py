"""Experts of a checkpoint as GGUF files have them: one tensor for each projection."""

from __future__ import annotations

import numpy as np


def stacked(tensors):
    """Stack the experts of a projection under the name of the gguf package's map."""
    found, stacks = {}, {}
    for name, values in tensors.items():
        stem, dot, rest = name.partition(".experts.")
        if dot:
            stacks.setdefault(f"{stem}.experts.{rest.split('.', 1)[1]}", []).append(
                values
            )
        else:
            found[name] = values
    return found | {name: np.stack(parts) for name, parts in stacks.items()}
