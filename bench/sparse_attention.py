"""Prompts and decoding of a shape of sparse attention with random weights.

    python bench/sparse_attention.py [--device cpu:0] [--prompts 2048 8192]
    python bench/sparse_attention.py --device cuda:0 --prompts 8192 32768 131072

Layers have the attention of DeepSeek-V3.2: an indexer of 64 heads chooses 2,048 tokens.
One request at a time: seconds of a prompt to its first token, and milliseconds of each
of ``--tokens`` later ones; then the same of layers of DeepSeek-V3, which attend to all
tokens. The indexer reads 128 numbers of each token and attention 576 of the chosen
ones, so that the time of a token grows with the context, but by less. ``--cpu-time``
counts processor time of all threads, for a machine that others share.
"""

from __future__ import annotations

import argparse

from mamba2 import measured
from random_models import random_language

from inl import EngineConfig, InferenceEngine

SHAPE = "sparse"


def run(given, *, dense):
    context = max(given.prompts) + given.tokens + 64
    language = random_language(SHAPE, context, given.layers, dense=dense)
    config = EngineConfig(
        backend=given.device, max_batch=1, context=context, dtype=given.dtype,
        prefix_cache=False,
    )  # fmt: skip
    with InferenceEngine(language, config=config) as engine:

        def generate(ids, count):
            engine.generate([ids], max_tokens=count, ignore_eos=True)

        measured("all tokens" if dense else "chosen", given, generate)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--no-dense", action="store_true")
    given = parser.parse_args()
    run(given, dense=False)
    if not given.no_dense:
        run(given, dense=True)


if __name__ == "__main__":
    main()
