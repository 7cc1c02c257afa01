"""Speedup from pruning the last layer to the sampled tokens, on an NVIDIA GPU.

    python bench/cuda_last_layer.py --model 8b smollm2 --ttft 8000 [--check]

Two runners share one model's weights; the second one computes the last layer for all
tokens. They are timed alternately, so that both run at the same temperature.
``--check`` first compares two layers of the shape with a plain torch model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import numpy as np
import torch
from cuda_check import check
from cuda_engines import Serving, load, random_prompts
from cuda_serve import products_rate
from cuda_steps import copy_rate
from random_models import SHAPES

from inl.device import Device
from inl_cuda.backend import CudaBackend


def unpruned(model):
    """Return the model without pruning of the last layer."""
    layer = model.layer
    return replace(
        model, layer=lambda ops, *rest, index: layer(ops, *rest, index=index)
    )


def compare(title, servers, rounds, prompt):
    """Time the servers alternately; print medians and the median of the ratios."""
    found = [
        [1e3 * server.answer([prompt()], 1) for server in servers]
        for _ in range(rounds)
    ]
    ours, other = zip(*found, strict=True)
    ratio = statistics.median(a / b for a, b in found)
    print(f"{title}: {statistics.median(ours):.2f} ({min(ours):.2f} to "
          f"{max(ours):.2f}) ms, all tokens {statistics.median(other):.2f} "
          f"({min(other):.2f} to {max(other):.2f}); {ratio:.4f} of it",
          flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["8b"], choices=SHAPES)
    parser.add_argument("--ttft", type=int, nargs="+", default=[8000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    backend, rng = CudaBackend(Device("cuda:0")), np.random.default_rng(0)
    copies, products = copy_rate(), products_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ceilings: "
          f"copies {copies / 1e12:.2f} TB/s, products {products / 1e12:.0f} TFLOP/s",
          flush=True)  # fmt: skip
    right = True
    for name in given.model:
        right &= not given.check or check(backend, name)
        loaded, _ = load(backend, name)
        variants = loaded, replace(loaded, model=unpruned(loaded.model))
        vocab = loaded.config.vocab_size

        for length in given.ttft:
            servers = [
                Serving.shape(backend, variant, 8, length + 64, 8192)
                for variant in variants
            ]

            def prompt(length=length, vocab=vocab):
                return random_prompts(rng, 1, length, vocab)[0]

            for server in servers:
                server.answer([prompt()], 1)
            compare(f"{name}, first token of {length}", servers, given.rounds, prompt)
            for server in servers:
                server.close()
        del loaded, variants
        torch.cuda.empty_cache()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
