"""Checks of caches in the other dtypes that a backend offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from inl.dtypes import E4M3, rounded_e4m3, widen
from inl.testing.check import Check, Measure, require
from inl.testing.oracle import Tiny
from inl.testing.play import admission, most_tokens, one_step
from inl.testing.runner_frames import first_blocks, opened, some_ids
from inl.testing.tiny import plain_logits

LOUDER: Final = 16
"""Factor of the keys and values of the last head, and divisor of what multiplies them:
the result is the same, and a scale that heads share clips the last one or coarsens the
others. A power of two, so that it rounds nothing."""

SLACK: Final = 4.0
"""Allowed error, as a factor on that of rounding keys and values alone."""


def _int8(x: Any) -> Any:
    """Round [heads, T, d] to int8 with a scale for each token and head."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30) / 127
    return np.rint(x / scale) * scale


ROUNDED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int8": _int8,
    E4M3: rounded_e4m3,
}
"""What a cache of the dtype stores; other dtypes are not checked."""


def kv_dtype_checks(tiny: Tiny) -> Iterator[Check]:
    """Yield a check of the logits with a cache of each dtype in ``kv_dtypes``."""
    for dtype in tiny.target.backend.traits.kv_dtypes:
        if dtype in ROUNDED:
            name = f"runner/logits/{tiny.dtype}/kv {dtype}"
            yield Check("runner", name, partial(_logits, tiny, dtype))


def _with_loud_head(tiny: Tiny) -> Tiny:
    """Return the model with large keys and values in the last key-value head."""
    found = Tiny(tiny.target, tiny.dtype)
    dim = found.hf["head_dim"]
    own = dim * found.hf["num_attention_heads"] // found.hf["num_key_value_heads"]
    factors: dict[str, tuple[Any, float]] = {
        "k_proj": (np.s_[-dim:], LOUDER),
        "v_proj": (np.s_[-dim:], LOUDER),
        "q_proj": (np.s_[-own:], 1 / LOUDER),
        "o_proj": (np.s_[:, -own:], 1 / LOUDER),
    }
    for name, tensor in found.tensors.items():
        for module, (part, factor) in factors.items():
            if f".{module}.weight" in name:
                found.tensors[name] = tensor.copy()
                found.tensors[name][part] *= factor
    return found


def _logits(tiny: Tiny, kv_dtype: str) -> Measure:
    """Logits of a prompt in two chunks, the second of which reads the cache."""
    uneven = _with_loud_head(tiny)
    with opened(uneven, kv_dtype=kv_dtype) as runner:
        limits = runner.limits
        count = most_tokens(limits, 37)
        ids = some_ids(uneven, count)
        runner.submit(admission(limits, 1, first_blocks(runner, count)))
        chunks = ids[: count // 2], ids[count // 2 :]
        for step, chunk in enumerate(chunks, start=1):
            frame = one_step(limits, [(1, chunk)], step=step, decoding=0)
            if step == 1:
                runner.submit(frame)
                runner.collect()
        found = widen(runner.logits(frame))[0].astype(np.float64)
    plain = uneven.logits(ids)[-1]
    stored = plain_logits(uneven.hf, uneven.tensors, ids, ROUNDED[kv_dtype])[-1]
    error = float(np.abs(found - plain).max())
    bound = SLACK * float(np.abs(stored - plain).max() + uneven.expected_error(ids))
    measure = Measure(error, bound)
    require(
        measure.ratio <= 1,
        f"logits with a cache in {kv_dtype}: error {error:.3g} > {bound:.3g}, "
        f"{SLACK:g} times the error of rounding keys and values; the last key-value "
        f"head has {LOUDER} times the values of the first: look for a scale that heads "
        f"or tokens share; seed {uneven.target.seed}",
        measure,
    )
    return measure
