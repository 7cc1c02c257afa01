"""Speculation on random weights of a model's shape, for ``speculation.py --shape``."""

from __future__ import annotations

import random
import statistics
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np
from random_models import Random, random_language
from speculation import generate, print_times

from inl.config import EngineConfig
from inl.dtypes import HostArray
from inl.engine.inference_engine import InferenceEngine
from inl.errors import TokenizerNotFound
from inl.speculation.drafters import SyntheticDrafter

PROMPT = 200
LARGE = np.uint16(12 << 7)
"""Added to the bits of a number in bfloat16, multiplies it by 4096."""


class Repeating(Random):
    """Random weights with embeddings so large that each token is followed by itself.

    Otherwise the most probable tokens of random weights are so close that rounding
    decides, and the drafts of a known text are soon wrong.
    """

    def tensor(self, name: str) -> HostArray:
        if "embed_tokens" not in name and "lm_head" not in name:
            return super().tensor(name)
        shape = self.specs[name].shape
        # Without the last numbers, no two rows are equal.
        data = np.resize(self._bits[:-5] + LARGE, shape)
        data.setflags(write=False)
        return HostArray(data, "bfloat16", shape)

    def tokenizer(self) -> Any:
        raise TokenizerNotFound("random weights: have no tokenizer")


def compare_shape(args: Namespace) -> None:
    """Print the times of steps, then the speed with and without drafts."""
    found = random_language(args.shape)
    checkpoint: Any = found.checkpoint
    language = replace(found, checkpoint=Repeating(checkpoint.config, checkpoint.specs))
    config = found.config
    per_token = 4 * config.layers * config.kv_heads * config.head_dim
    rows, context = max(args.rows), PROMPT + args.tokens + 8
    settings = EngineConfig(
        backend=args.device, max_batch=rows, context=context, prefix_cache=False,
        check_weights=False, cache_bytes=(rows + 8) * (context + 32) * per_token,
    )  # fmt: skip
    numbers = random.Random(7)
    prompts = [
        [numbers.randrange(config.vocab_size) for _ in range(PROMPT)]
        for _ in range(rows)
    ]
    texts = {tuple(prompt): prompt[-1:] * args.tokens for prompt in prompts}
    plain = InferenceEngine(language, config=settings)
    drafting = InferenceEngine(
        language, config=replace(settings, speculation="ngram"),
        drafter=SyntheticDrafter(texts, args.acceptance),
    )  # fmt: skip
    print_times(drafting)
    for count in args.rows:
        _compare(plain, drafting, prompts[:count], args)


def _compare(
    plain: InferenceEngine, drafting: InferenceEngine, prompts: list[list[int]],
    args: Namespace,
) -> None:  # fmt: skip
    counts = drafting.speculation
    assert counts is not None, "its config asks for it"
    slow, fast = [], []
    for run in range(args.runs + 1):
        if run == 1:  # the first captures the programs
            before = counts.drafted, counts.accepted
        one = generate(plain, prompts, args.tokens)
        two = generate(drafting, prompts, args.tokens)
        assert one.outputs == two.outputs, "the same tokens with and without drafts"
        slow.append(one.seconds)
        fast.append(two.seconds)
    first, second = (statistics.median(each[1:]) for each in (slow, fast))
    drafted, accepted = counts.drafted - before[0], counts.accepted - before[1]
    made = args.runs * len(prompts) * args.tokens
    print(
        f"{len(prompts):4} rows: {1 / first:9.1f} {1 / second:9.1f} tok/s "
        f"{first / second:5.2f} x  drafts per token {drafted / made:.2f}, accepted "
        f"{accepted / max(drafted, 1):.0%}",
        flush=True,
    )
