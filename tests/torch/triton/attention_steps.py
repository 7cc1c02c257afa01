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


def attention_cases(rng):
    for label, (cached, counts, extra) in STEPS.items():
        step, blocks = random_step(rng, cached or [0], counts, **extra)
        size = extra.get("block_size", 4)
        for heads, kv_heads, dim in DIMS:
            q = rng.standard_normal((step.tokens.shape[0], heads, dim))
            cache = Cache(*rng.standard_normal((2, blocks, size, kv_heads, dim)))
            for window, cap in ((None, None), (7, 3.0)):
                attrs = {"scale": dim**-0.5, "window": window, "cap": cap, "group": 0}
                name = f"{label}/{heads}/{kv_heads}x{dim}/{window}"
                yield Case(name, (q, cache, step), attrs)
