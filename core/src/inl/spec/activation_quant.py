"""How a kernel may round what packed weights multiply, as models in NumPy.

A kernel that does names one (``Kernel.inputs``). With packed weights it is then judged
beside the body whose products round their input the same way, see
:mod:`inl.spec.tolerance`; with plain weights as every other kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

GROUP: Final = 32
"""Neighbors that share a scale, as most packed weights have it."""


def int8_groups(x: Any) -> Any:
    """``x`` [..., K] as whole numbers up to 127 times a scale for each group.

    A last group may be short. The dtype stays.
    """
    x = np.asarray(x)
    short = -x.shape[-1] % GROUP
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    groups = padded.reshape(*x.shape[:-1], -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    codes = np.rint(groups / np.where(scale > 0, scale, 1))
    return (codes * scale).reshape(padded.shape)[..., : x.shape[-1]].astype(x.dtype)


INT8: Final = "int8 in groups of 32"

ACTIVATION_QUANTS: Final[Mapping[str, Callable[[Any], Any]]] = {INT8: int8_groups}
"""Every rounding that a kernel may name."""
