"""Checks of caches in the other dtypes that a backend offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from inl.dtypes import E4M3, rounded_e4m3, widen
from inl.testing.check import Check, Measure, require
from inl.testing.oracle import Tiny
from inl.testing.play import admission, most_rows, most_tokens, one_step
from inl.testing.runner_frames import first_blocks, opened, some_ids
from inl.testing.tiny import plain_logits

LOUDER: Final = 16
"""Factor of the keys and values of the last head, and divisor of what multiplies them:
the result is the same, and a scale that heads share clips the last one or coarsens the
others. A power of two, so that it rounds nothing."""

LOUD_TOKEN: Final = 7
"""Token whose keys and values are large in a second sequence of the same steps: a scale
that tokens share coarsens those of the first."""
LOUD_LANE: Final = 0
"""Lane of hidden states that only this token has."""

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
    """Return the model with large keys and values in the last key-value head.

    Those of :data:`LOUD_TOKEN` are large in every head, and of no other token.
    """
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
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            found.tensors[name][:, LOUD_LANE] *= LOUDER
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found.tensors[name] = found.tensors[name].copy()
            found.tensors[name][LOUD_LANE] = 0
    table = found.tensors["model.embed_tokens.weight"].copy()
    loudest = float(np.abs(table).max())
    table[:, LOUD_LANE] = 0
    table[LOUD_TOKEN] = 0
    table[LOUD_TOKEN, LOUD_LANE] = loudest
    found.tensors["model.embed_tokens.weight"] = table
    return found


def _logits(tiny: Tiny, kv_dtype: str) -> Measure:
    """Logits of a prompt in two chunks, the second of which reads the cache.

    A second row of each step has loud tokens, where a bucket has room for them.
    """
    uneven = _with_loud_head(tiny)
    with opened(uneven, kv_dtype=kv_dtype) as runner:
        limits = runner.limits
        count = most_tokens(limits, 37)
        drawn = some_ids(uneven, count)
        ids = [LOUD_TOKEN + 1 if token == LOUD_TOKEN else token for token in drawn]
        blocks = first_blocks(runner, count)
        others = [block + len(blocks) for block in blocks]
        runner.submit(admission(limits, 1, blocks))
        runner.submit(admission(limits, 2, others))
        is_wide = most_rows(limits, 2, count // 2 + 4) > 1 and count > 9
        loud = [(2, [LOUD_TOKEN] * 3)] if is_wide else []
        chunks = ids[: count // 2], ids[count // 2 :]
        for step, chunk in enumerate(chunks, start=1):
            frame = one_step(limits, [(1, chunk), *loud], step=step, decoding=0)
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
        f"head has {LOUDER} times the values of the first, and the tokens of a second "
        "sequence those of this one: look for a scale that heads or tokens share; seed "
        f"{uneven.target.seed}",
        measure,
    )
    return measure
