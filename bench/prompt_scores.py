"""Log-probabilities of prompts, as lm-eval reads them, beside a plain prefill.

    python bench/prompt_scores.py MODEL [--backend cpu] [--requests 200] [--tokens 64]

Prints the seconds of both and their ratio. A prefill computes logits of one token of a
prompt, scores those of all: the product with the vocabulary is part of the difference.
"""

from __future__ import annotations

import argparse
import random
from time import perf_counter

from inl import EngineConfig, InferenceEngine

TIMES = 3


def main() -> None:
    """Print the best of TIMES of each, in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--backend")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    given = parser.parse_args()
    options = {} if given.backend is None else {"backend": given.backend}
    config = EngineConfig(
        context=given.tokens + 2, prefix_cache=False, max_batch=64, **options
    )
    engine = InferenceEngine.from_pretrained(given.model, config)
    with engine:
        draws = random.Random(0)
        vocab = engine.core.runner.limits.vocab
        prompts = [
            [draws.randrange(vocab) for _ in range(given.tokens)]
            for _ in range(given.requests)
        ]
        best = {None: float("inf"), 1: float("inf")}
        for _ in range(TIMES + 1):  # the first compiles
            for count in best:
                started = perf_counter()
                tokens = 1 if count is None else 0
                engine.generate(prompts, max_tokens=tokens, prompt_logprobs=count)
                best[count] = min(best[count], perf_counter() - started)
        plain, scored = best.values()
        print(
            f"{given.requests} prompts of {given.tokens} tokens: prefill {plain:.2f} s,"
            f" with scores {scored:.2f} s, {scored / plain:.2f} times"
        )


if __name__ == "__main__":
    main()
