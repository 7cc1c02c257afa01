"""How often a greedy answer changes with its batch and with the prefix cache.

    python bench/repeated_prompts.py [MODEL.gguf] --device cuda:0 [--prompts 64]

Prompts are passages of this repository's documentation. Each is answered alone with an
empty prefix cache, which is the reference; alone again, with its prefix from the cache;
among all others, with and without the cache. One engine with default settings answers
all; then one with ``invariant=True``. Prints how many answers are equal, and where the
others begin to differ. Exits with 1 if any differs in the invariant mode.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import resolve_model

DOCS = Path(__file__).resolve().parents[1] / "docs"

Answers = list[tuple[int, ...]]


def passages(engine: InferenceEngine, count: int, tokens: int) -> list[list[int]]:
    """Passages of different lengths, ``tokens`` on average."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    ids = engine.tokenizer.encode(text[: 12 * count * tokens])
    lengths = [tokens * (2 + at % 5) // 4 for at in range(count)]
    found, begin = [], 0
    for length in lengths:
        found.append(ids[begin : begin + length])
        begin += length
    if len(ids) < begin:
        raise SystemExit(f"the documentation has {len(ids)} tokens, of {begin}")
    return found


def ways(
    engine: InferenceEngine, prompts: list[list[int]], tokens: int
) -> Iterator[tuple[str, Answers]]:
    """Yield the name of each way to ask, and its answers."""

    def asked(some: list[list[int]]) -> Answers:
        found = engine.generate(some, max_tokens=tokens, ignore_eos=True)
        return [each.token_ids for each in found]

    yield "alone", [asked([prompt])[0] for prompt in prompts]
    yield "alone, repeated", [asked([prompt])[0] for prompt in prompts]
    yield "together, repeated", asked(prompts)
    engine.reset_prefix_cache()
    yield "together", asked(prompts)


def first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next(at for at, (a, b) in pairs if a != b)


def compared(engine: InferenceEngine, given: argparse.Namespace) -> int:
    """Print a line for each way to ask; return the number of answers that differ."""
    prompts = passages(engine, given.prompts, given.length)
    reference: Answers = []
    differing = 0
    for name, answers in ways(engine, prompts, given.tokens):
        if not reference:
            reference = answers
            continue
        pairs = zip(reference, answers, strict=True)
        places = [first_difference(*pair) for pair in pairs if pair[0] != pair[1]]
        differing += len(places)
        after = f", from token {statistics.median(places):.0f} on" if places else ""
        equal = len(prompts) - len(places)
        print(f"  {name:20} {equal} of {len(prompts)} equal{after}", flush=True)
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    path, differing = resolve_model(given.model), 0
    for invariant in (False, True):
        config = EngineConfig(backend=given.device, invariant=invariant)
        with InferenceEngine.from_pretrained(path, config=config) as engine:
            print(f"{engine.device}, invariant={invariant}, {given.tokens} tokens")
            differing = compared(engine, given)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
