"""Cases of attention: splits of keys, groups of heads, tails, chunks of prompts."""

from __future__ import annotations

from inl.ops.attention import random_step
from inl.spec.cache import Cache
from inl.spec.op import Case

STEPS = {
    "one": ([], [1], {}),
    "empty row": ([37], [1], {"pad_rows": 1, "pad_tokens": 1}),
    "long": ([150, 0, 71], [1, 1, 1], {"block_size": 16}),
    "chunks": ([33, 5, 0], [1, 20, 17], {"block_size": 16, "pad_tokens": 28}),
}
DIMS = ((9, 3, 64), (4, 1, 128), (22, 2, 16), (2, 2, 80))
LIMITS = ((None, None), (7, 3.0))
"""Windows and caps of scores."""


def limits_of(number, pair, *, both):
    """The (window, cap) of a case: both of ``pair``, or one of them by turns."""
    return pair if both else pair[number % 2 :][:1]


def attention_cases(rng, *, both=True):
    """Cases of each step and head size: without and with a window, or by turns."""
    for place, (label, (cached, counts, extra)) in enumerate(STEPS.items()):
        step, blocks = random_step(rng, cached or [0], counts, **extra)
        size = extra.get("block_size", 4)
        for number, (heads, kv_heads, dim) in enumerate(DIMS, place):
            q = rng.standard_normal((step.tokens.shape[0], heads, dim))
            cache = Cache(*rng.standard_normal((2, blocks, size, kv_heads, dim)))
            for window, cap in limits_of(number, LIMITS, both=both):
                attrs = {"scale": dim**-0.5, "window": window, "cap": cap, "group": 0}
                name = f"{label}/{heads}/{kv_heads}x{dim}/{window}"
                yield Case(name, (q, cache, step), attrs)
