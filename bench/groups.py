"""Correctness and speed of one model over several devices, by placement.

    python bench/groups.py                       # on a machine with two GPUs
    python bench/groups.py --model 7b-a1b --expert 2     # a mixture of 64 experts
    python bench/groups.py --device cpu --model tiny --placements one pipeline=2

``--expert E`` compares placements of a mixture: one device; E ranks with whole experts,
which divide the rows of a step, or repeat attention; and E with a part of each. Weights
are random, in a file that every rank reads. A model of two layers is decoded in float32
in each placement and compared with float64; then the full shape is timed in bfloat16:
sequences that decode together after prompts of 128 tokens, the first token of a long
prompt, and ``--requests`` of 512 tokens answered with
128. On GPUs the time
to read all weights once is the least for one sequence. ``cuda_exchange.py`` times a
single exchange between ranks. Exits with 1 where the ranks' tokens are wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from random_models import FIELDS

from inl import EngineConfig
from inl.checkpoints.checkpoint import open_checkpoint
from inl.engine.core import EngineCore
from inl.errors import RunnerError
from inl.executor.model_loader import LanguageModel, open_model
from inl.models import llama, mixtral
from inl.runners.startup import start
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.tree import leaves
from inl.testing.near_tie import BOUNDS
from inl.testing.tiny import plain_logits
from inl.weights.sources import stored_tensors

SHAPES = {
    "8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
    "1b": (128256, 2048, 8192, 16, 32, 8, 64, False),
    "tiny": (512, 128, 256, 3, 4, 2, 32, False),
    "30b-a3b": (151936, 2048, 768, 48, 32, 4, 128, False),
    "7b-a1b": (50304, 2048, 1024, 16, 16, 16, 128, False),
    "tiny-mixture": (512, 128, 96, 3, 4, 2, 32, False),
}
MIXTURES = {"30b-a3b": (128, 8), "7b-a1b": (64, 8), "tiny-mixture": (8, 2)}
"""Experts, and those of a token: sizes of Qwen3-30B-A3B and of OLMoE."""


def write_model(
    folder: Path, shape: tuple[Any, ...], layers: int | None, experts: tuple[int, ...]
) -> Path:
    """Write a folder with a config and tensors of random bfloat16 numbers.

    experts: their number, and that of a token; empty for a dense model.
    """
    hf = dict(zip(FIELDS, shape, strict=True)) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 32768, "attention_bias": False,
    }  # fmt: skip
    hf["num_hidden_layers"] = layers or hf["num_hidden_layers"]
    model = llama.MODEL
    if experts:
        names = "num_local_experts", "num_experts_per_tok"
        hf |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        hf |= dict(zip(names, experts, strict=True))
        model = mixtral.MODEL
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    params = {
        name: size
        for group in leaves(model.weights(model.config(hf)))
        for param in group.params.values()
        for name, size in stored_tensors(param).items()
    }
    header, end = {}, 0
    for name, size in params.items():
        start, end = end, end + 2 * int(np.prod(size))
        header[name] = {
            "dtype": "BF16", "shape": list(size), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for place, size in enumerate(params.values()):
            count = int(np.prod(size))
            scale = 1.4 / size[-1] ** 0.5 if len(size) > 1 else 0.1
            part = np.roll(numbers, 7919 * place)[: min(count, len(numbers))] * scale
            part += 1.0 if len(size) == 1 else 0.0
            bits = (part.view(np.uint32) >> 16).astype(np.uint16)
            for start in range(0, count, len(bits)):
                file.write(bits[: count - start].tobytes())
    return folder


def begin(
    language: LanguageModel, device: str, placement: str, dtype: str, **sizes: int
) -> tuple[EngineCore, float]:
    """An engine without a tokenizer, and its start time in seconds."""
    config = EngineConfig(
        backend=device, placement=None if placement == "one" else placement,
        dtype=dtype, sampling="greedy", worker_seconds=120,
        **({"max_batch": 8, "context": 512, "cache_bytes": 1 << 30} | sizes),
    )  # fmt: skip
    began = time.perf_counter()
    runner = start(language, config).runner
    budget = runner.limits.token_budget
    core = EngineCore(runner, SchedulerConfig(prefix_cache=False, token_budget=budget))
    return core, time.perf_counter() - began


def answers(core: EngineCore, prompts: list[list[int]], count: int) -> list[list[int]]:
    requests = [Request(ids, max_tokens=count) for ids in prompts]
    for request in requests:
        core.add(request)
    while core.has_work:
        for event in core.step():
            if event.error is not None:
                raise RunnerError("a step failed") from event.error
    return [request.output_ids for request in requests]


def ms_per_step(core: EngineCore, prompts: list[list[int]], count: int) -> float:
    """Milliseconds for a token of each of some sequences that decode together."""
    requests = [Request(prompt, max_tokens=count) for prompt in prompts]
    for request in requests:
        core.add(request)
    times = []
    while core.has_work:
        core.step()
        # Rows of other lanes of a pipeline are in other steps.
        if all(request.output_ids for request in requests):
            got = sum(len(request.output_ids) for request in requests)
            times.append((time.perf_counter(), got))
    (began, before), (ended, after) = times[0], times[-1]
    return 1e3 * (ended - began) * len(prompts) / (after - before)


def seconds_of(core: EngineCore, prompts: list[list[int]], count: int) -> float:
    """Seconds until all requests are answered."""
    began = time.perf_counter()
    answers(core, prompts, count)
    return time.perf_counter() - began


def right(language: LanguageModel, device: str, placement: str, prompts: Any) -> bool:
    """Decode in float32 and check every token by float64 logits of its sequence."""
    core, _ = begin(language, device, placement, "float32")
    found = answers(core, prompts, 24)
    core.runner.close()
    files = open_checkpoint(language.checkpoint.path)
    tensors = {
        name: (files.tensor(name).data.astype(np.uint32) << 16).view(np.float32)
        for name in files.names()
    }
    worst, equal = 0.0, 0
    for prompt, answer in zip(prompts, found, strict=True):
        logits = plain_logits(files.config, tensors, [*prompt, *answer[:-1]])
        logits = logits[len(prompt) - 1 :]
        behind = logits.max(-1) - logits[np.arange(len(answer)), answer]
        worst, equal = max(worst, float(behind.max())), equal + int((behind == 0).sum())
    print(
        f"{placement}, float32, 2 layers: {equal} of {24 * len(prompts)} tokens are "
        f"the likeliest of float64, others at most {worst:.1e} behind",
        flush=True,
    )
    return worst < BOUNDS["float32"]


def agreed(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument(
        "--placements", nargs="+", default=["one", "tensor=2", "pipeline=2"]
    )
    parser.add_argument(
        "--expert", type=int, metavar="E", help="compare placements of a mixture"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--cache", type=int, default=40 << 30, metavar="BYTES")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    if given.expert:
        axes = "data", "expert", "tensor"
        given.placements = ["one", *(f"{axis}={given.expert}" for axis in axes)]
    experts = MIXTURES.get(given.model, ())
    fewer = (min(experts[0], 16), experts[1]) if experts else ()
    draw = np.random.default_rng(1)
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        small = (2048, *SHAPES[given.model][1:])
        two = open_model(write_model(Path(folder) / "two", small, 2, fewer))
        prompts = [draw.integers(0, 2048, n).tolist() for n in (1, 9, 40)]
        for placement in given.placements:
            holds &= right(two, given.device, placement, prompts)
        whole = open_model(
            write_model(Path(folder) / "whole", SHAPES[given.model], None, experts)
        )
        size = (whole.checkpoint.path / "model.safetensors").stat().st_size
        vocab = SHAPES[given.model][0]
        if given.device.startswith("cuda"):
            from cuda_steps import copy_rate

            rate = copy_rate()
            print(f"copies run at {rate / 1e12:.2f} TB/s: {1e3 * size / rate:.3f} "
                  "ms to read all weights once", flush=True)  # fmt: skip
        texts = {}
        for placement in given.placements:
            core, seconds = begin(
                whole, given.device, placement, "bfloat16",
                max_batch=max(*given.rows, min(given.requests, 512)),
                context=max(given.prompt + 64, 1024), cache_bytes=given.cache,
            )  # fmt: skip
            draw = np.random.default_rng(2)
            prompts = draw.integers(0, vocab, (max(given.rows), 128)).tolist()
            texts[placement] = answers(core, prompts[:1], given.tokens)[0]
            first = given.placements[0]
            same = agreed(texts[first], texts[placement])
            print(
                f"{given.model} bfloat16, {placement}: started in {seconds:.1f} s, "
                f"first {same} of {given.tokens} tokens as in {first}",
                flush=True,
            )
            for rows in given.rows:
                found = [
                    ms_per_step(core, prompts[:rows], given.tokens)
                    for _ in range(given.runs)
                ]
                print(
                    f"  {rows} rows: {statistics.median(found):.3f} ms a token "
                    f"({min(found):.3f} to {max(found):.3f})",
                    flush=True,
                )
            long = draw.integers(0, vocab, (given.runs + 1, given.prompt)).tolist()
            found = [1e3 * seconds_of(core, [each], 1) for each in long][1:]
            middle = statistics.median(found)
            print(f"  first token of {given.prompt}: {middle:.1f} ms", flush=True)
            many = draw.integers(0, vocab, (given.requests, 512)).tolist()
            # The first time compiles the programs of steps of many sizes.
            total = min(seconds_of(core, many, 128) for _ in range(2))
            print(
                f"  {given.requests} requests of 512 + 128: {total:.2f} s, "
                f"{given.requests * 128 / total:.0f} tokens/s",
                flush=True,
            )
            core.runner.close()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
