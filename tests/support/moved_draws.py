"""Random requests that move between engines on hashes, and limits of such engines."""

from __future__ import annotations

from inl.spec.limits import Limits

VOCAB = 256


def limits_of(size, windows=(), **changes):
    blocks = 96 // size
    fields = {
        "slots": 5, "blocks": (blocks * 3,) * max(len(windows), 1), "block_size": size,
        "max_blocks_per_seq": -(-96 // size), "vocab": VOCAB, "depth": 2,
        "sampler": "sample_filtered", "windows": windows,
    }  # fmt: skip
    return Limits(**{**fields, **changes})


REGEX = {"regex": "[ab]{3}(cd|ce){2}[0-9]{12}"}
OPTIONS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {7: 3.0, 8: -2}},
    {"temperature": 0.5, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.7, "structured": REGEX},
    {"temperature": 0.7, "min_tokens": 1, "bad_words": ["a", "bc"]},
    {"temperature": 0, "allowed_token_ids": {3, 5, 7, 11}},
    {"temperature": 0.3, "cache_salt": "tenant", "stop_ids": {9}},
]


def prompt_of(draw):
    family = draw.randrange(3)
    return [100 + family * 20 + at % 17 for at in range(draw.randint(3, 40))]
