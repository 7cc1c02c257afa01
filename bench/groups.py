"""Correctness and speed of one model over several devices, by placement.

    python bench/groups.py                       # on a machine with two GPUs
    python bench/groups.py --model 7b-a1b --expert 2     # a mixture of 64 experts
    python bench/groups.py --devices 1 2 4 --together --json 8b.json
    python bench/groups.py --device cpu --model tiny --placements one pipeline=2

``--devices N ...`` compares all placements of these numbers of devices. ``--expert E``
compares those of a mixture: one device; E ranks with whole experts, which divide the
rows of a step, or repeat attention; and E with a part of each. Weights are random, and
every process makes them for itself (``random_format.py``). A model of two layers is
decoded in float32 in each placement and compared with float64; then the full shape is
timed in bfloat16: sequences that decode together after prompts of 128 tokens, the first
token of a long prompt, and ``--requests`` of 512 tokens answered with 128. Each number
is beside its limit (``group_limits.py``): bytes over the bandwidth of a copy, or
products over the rate of a large one, and the exchanges between devices, all measured
in the same call. ``--together`` runs placements at the same time that need other GPUs.
Placements whose weights do not fit are left out. Exits with 1 where the tokens are
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from group_limits import Limits, Rates, Shape, measured
from random_format import register_format
from random_models import FIELDS

from inl import EngineConfig
from inl.dtypes import widen
from inl.engine.core import EngineCore
from inl.errors import RunnerError
from inl.executor.model_loader import LanguageModel, open_model
from inl.placement.placement import Placement, parse_placement
from inl.runners.startup import start
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.testing.near_tie import BOUNDS
from inl.testing.tiny import plain_logits

SHAPES = {
    "8b": Shape(128256, 4096, 14336, 32, 32, 8, 128),
    "70b": Shape(128256, 8192, 28672, 80, 64, 8, 128),
    "1b": Shape(128256, 2048, 8192, 16, 32, 8, 64),
    "tiny": Shape(512, 128, 256, 4, 4, 4, 32),
    "30b-a3b": Shape(151936, 2048, 768, 48, 32, 4, 128, (128, 8)),
    "7b-a1b": Shape(50304, 2048, 1024, 16, 16, 16, 128, (64, 8)),
    "tiny-mixture": Shape(512, 128, 96, 4, 4, 4, 32, (8, 2)),
}
"""With the sizes of Llama 3, of Qwen3-30B-A3B and of OLMoE."""
RESERVED = 14 << 30
"""Bytes of a GPU for activations, programs and libraries."""
MAX_CACHE = 40 << 30


def write_model(path: Path, shape: Shape) -> LanguageModel:
    """Write the config of a model of random weights, and open it."""
    hf = dict(zip(FIELDS, (*shape[:7], False), strict=True)) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 32768, "attention_bias": False,
    }  # fmt: skip
    if shape.experts[0]:
        names = "num_local_experts", "num_experts_per_tok"
        hf |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        hf |= dict(zip(names, shape.experts, strict=True))
    path.write_text(json.dumps(hf))
    return open_model(path)


def placements_of(devices: int, *, mixture: bool) -> list[str]:
    """Return the placements of a number of devices that are compared."""
    if devices == 1:
        return ["one"]
    if mixture:
        axes = [f"data={devices}", f"expert={devices}"]
        return axes + [f"data=2,expert={devices // 2}"] * (devices > 2)
    axes = [f"tensor={devices}", f"pipeline={devices}"]
    stages = (2**n for n in range(1, devices.bit_length() - 1))
    return axes + [f"pipeline={each},tensor={devices // each}" for each in stages]


def placement_of(name: str) -> Placement:
    return Placement() if name == "one" else parse_placement(name)


def begin(
    language: LanguageModel,
    device: str,
    placement: str,
    dtype: str,
    interval: int = 0,
    **sizes: int,
) -> tuple[EngineCore, float]:
    """An engine without a tokenizer, and its start time in seconds."""
    config = EngineConfig(
        backend=device, placement=None if placement == "one" else placement,
        dtype=dtype, sampling="greedy", worker_seconds=120, check_weights=False,
        expert_load_interval=interval or None,
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


class Oracle:
    """Float64 logits of a model's answers, computed once for each."""

    def __init__(self, language: LanguageModel, vocab: int) -> None:
        files = language.checkpoint
        self.config = files.config
        self.tensors = {name: widen(files.tensor(name)) for name in files.names()}
        self.vocab = vocab
        self._behind: dict[tuple[int, ...], Any] = {}

    def behind(self, prompt: list[int], answer: list[int]) -> Any:
        """How far each token's logit is behind the largest one."""
        ids = (*prompt, *answer)
        if ids not in self._behind:
            logits = plain_logits(self.config, self.tensors, ids[:-1])
            logits = logits[len(prompt) - 1 :]
            chosen = logits[np.arange(len(answer)), answer]
            self._behind[ids] = logits.max(-1) - chosen
        return self._behind[ids]


def right(
    language: LanguageModel, given: argparse.Namespace, placement: str, oracle: Oracle
) -> tuple[bool, str]:
    """Decode in float32 and check every token by float64 logits of its sequence."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, oracle.vocab, n).tolist() for n in (1, 9, 40)]
    core, _ = begin(language, given.device, placement, "float32")
    found = answers(core, prompts, 24)
    core.runner.close()
    pairs = zip(prompts, found, strict=True)
    behind = np.concatenate([oracle.behind(*pair) for pair in pairs])
    says = f"{int((behind == 0).sum())} of {len(behind)}"
    worst = float(behind.max())
    print(
        f"{placement}, float32, {language.config.layers} layers: {says} tokens are the "
        f"likeliest of float64, others at most {worst:.1e} behind",
        flush=True,
    )
    return worst < BOUNDS["float32"], says


def agreed(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def timed(
    whole: LanguageModel, given: argparse.Namespace, placement: str, rates: Rates
) -> dict[str, Any]:
    """Time the full shape in one placement."""
    shape = SHAPES[given.model]
    limits = Limits(shape, placement_of(placement), rates)
    core, seconds = begin(
        whole, given.device, placement, "bfloat16",
        max_batch=max(*given.rows, min(given.requests, 512)),
        context=max(given.prompt + 64, 1024), cache_bytes=cache_of(given, placement),
        interval=given.count_experts * (limits.placement.pipeline == 1),
    )  # fmt: skip
    draw, budget = np.random.default_rng(2), core.runner.limits.token_budget
    prompts = draw.integers(0, shape.vocab, (max(given.rows), 128)).tolist()
    text = answers(core, prompts[:1], given.tokens)[0]
    print(
        f"{given.model} bfloat16, {placement}: started in {seconds:.1f} s", flush=True
    )
    row: dict[str, Any] = {
        "placement": placement, "started_s": seconds, "text": text, "rows": {}
    }  # fmt: skip
    for rows in given.rows:
        found = [
            ms_per_step(core, prompts[:rows], given.tokens)
            for _ in range(given.runs + 1)
        ]
        row["rows"][str(rows)] = {
            "ms": statistics.median(found), "least": min(found), "most": max(found),
            "limit": 1e3 * limits.step(rows, 128 + given.tokens // 2),
            "exchanges": 1e3 * limits.sums(rows),
        }  # fmt: skip
    long = draw.integers(0, shape.vocab, (given.runs + 1, given.prompt)).tolist()
    found = [1e3 * seconds_of(core, [each], 1) for each in long][1:]
    row["first_ms"] = statistics.median(found)
    row["first_limit"] = 1e3 * limits.prompt(given.prompt, budget)
    many = draw.integers(0, shape.vocab, (given.requests, 512)).tolist()
    # The first time compiles the programs of steps of many sizes.
    total = min(seconds_of(core, many, 128) for _ in range(2))
    row["tokens_s"] = given.requests * 128 / total
    most = limits.requests(given.requests, 512, 128, budget)
    row["tokens_s_limit"] = given.requests * 128 / most
    if core.expert_loads.steps:
        owners = limits.placement.expert * limits.placement.data
        row["experts"] = max(core.expert_loads.imbalance())
        row["owners"] = max(core.expert_loads.imbalance(owners))
    core.runner.close()
    print_row(row, given)
    return row


def print_row(row: dict[str, Any], given: argparse.Namespace) -> None:
    for rows, found in row["rows"].items():
        print(
            f"  {rows} rows: {found['ms']:.3f} ms a token ({found['least']:.3f} to "
            f"{found['most']:.3f}), limit {found['limit']:.3f}, of which "
            f"{found['exchanges']:.3f} exchange",
            flush=True,
        )
    print(
        f"  first token of {given.prompt}: {row['first_ms']:.1f} ms, limit "
        f"{row['first_limit']:.1f}\n  {given.requests} requests of 512 + 128: "
        f"{row['tokens_s']:.0f} tokens/s, limit {row['tokens_s_limit']:.0f}",
        flush=True,
    )
    if "experts" in row:
        print(
            f"  most tokens of an expert {row['experts']:.2f} times the mean, of a "
            f"device {row['owners']:.2f}, in the least balanced layer",
            flush=True,
        )


def cache_of(given: argparse.Namespace, placement: str) -> int:
    """Bytes of the cache on each device: what the weights leave, by default."""
    if given.cache is not None:
        return int(given.cache)
    free = memory_of(given) - RESERVED
    used = SHAPES[given.model].bytes_per_device(placement_of(placement))
    return min(free - used, MAX_CACHE)


def memory_of(given: argparse.Namespace) -> int:
    if not given.device.startswith("cuda"):
        return 1 << 34
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def fitting(given: argparse.Namespace) -> Iterator[str]:
    """Yield the placements whose weights fit into the devices."""
    for placement in given.placements:
        need = SHAPES[given.model].bytes_per_device(placement_of(placement))
        if need + (RESERVED if given.cache is None else given.cache) < memory_of(given):
            yield placement
        else:
            print(f"{placement}: left out, {need / 1e9:.1f} GB of weights a device")


def end_with_parent() -> None:
    """End this process soon after the one that started it, and its ranks with it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_here(
    given: argparse.Namespace, placements: list[str], rates: Rates, folder: Path
) -> list[dict[str, Any]]:
    """Run placements one after the other."""
    shape = SHAPES[given.model]
    rows: list[dict[str, Any]] = [{} for _ in placements]
    if not given.unchecked:
        number, chosen = shape.experts
        small = shape._replace(
            vocab=min(shape.vocab, 2048), layers=max(2, given.stages),
            experts=(min(number, 16), chosen),
        )  # fmt: skip
        two = write_model(folder / "two.random", small)
        oracle = Oracle(two, small.vocab)
        for row, placement in zip(rows, placements, strict=True):
            row["right"], row["float32"] = right(two, given, placement, oracle)
    whole = write_model(folder / "whole.random", shape)
    for row, placement in zip(rows, placements, strict=True):
        row |= timed(whole, given, placement, rates)
    return rows


def run_together(
    given: argparse.Namespace, placements: list[str], rates: Rates, folder: Path
) -> list[dict[str, Any]]:
    """Run placements in processes of their own, at the same time on other GPUs."""
    rates_file = folder / "rates.json"
    rates_file.write_text(json.dumps(asdict(rates)))
    kind, _, first = given.device.partition(":")
    left, rows = list(placements), []
    while left:
        running: list[tuple[subprocess.Popen[bytes], Path]] = []
        used = 0
        for placement in sorted(left, key=lambda each: placement_of(each).count):
            count = placement_of(placement).count
            if used + count > max(given.devices):
                continue
            left.remove(placement)
            target = folder / f"{placement}.json"
            options = [
                "--device", f"{kind}:{int(first or 0) + used}" if first else kind,
                "--placements", placement, "--rates", str(rates_file),
                "--json", str(target), *given.passed,
            ]  # fmt: skip
            used += count
            command = [sys.executable, __file__, *options]
            running.append((subprocess.Popen(command), target))
        for process, _ in running:
            process.wait()
        for _, target in running:
            if not target.exists():
                raise SystemExit(f"{target.stem}: the process ended without an answer")
            rows += json.loads(target.read_text())["placements"]
    names = {row["placement"]: row for row in rows}
    return [names[placement] for placement in placements]


def table(rows: list[dict[str, Any]], given: argparse.Namespace) -> str:
    """Return the numbers, each with its limit in brackets, as Markdown."""
    counts = [f"{count} rows, ms" for count in given.rows]
    first = f"first token of {given.prompt:,}, ms"
    many = f"{given.requests} requests, tokens/s"
    head = ["", *counts, first, many, "float32 tokens"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        steps = (row["rows"][str(count)] for count in given.rows)
        lines.append(
            [row["placement"]]
            + [f"{step['ms']:.2f} ({step['limit']:.2f})" for step in steps]
            + [f"{row['first_ms']:.0f} ({row['first_limit']:.0f})"]
            + [f"{row['tokens_s']:,.0f} ({row['tokens_s_limit']:,.0f})"]
            + [row.get("float32", "not run")]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument("--placements", nargs="+")
    parser.add_argument(
        "--devices", type=int, nargs="+", help="all placements of these numbers"
    )
    parser.add_argument(
        "--expert", type=int, metavar="E", help="compare placements of a mixture"
    )
    parser.add_argument(
        "--together", action="store_true",
        help="run placements that need other GPUs at the same time",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--cache", type=int, metavar="BYTES")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--count-experts", type=int, default=0, metavar="N",
        help="count the tokens of experts in every N-th step",
    )  # fmt: skip
    parser.add_argument("--unchecked", action="store_true", help="no float32 tokens")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rates", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    experts = SHAPES[given.model].experts[0]
    if given.placements is None and given.devices:
        given.placements = [
            placement
            for count in given.devices
            for placement in placements_of(count, mixture=experts > 0)
        ]
    elif given.expert:
        axes = "data", "expert", "tensor"
        given.placements = ["one", *(f"{axis}={given.expert}" for axis in axes)]
    given.placements = given.placements or ["one", "tensor=2", "pipeline=2"]
    counts = [placement_of(each).count for each in given.placements]
    given.devices = [*(given.devices or []), *counts]
    given.stages = max(placement_of(each).pipeline for each in given.placements)
    passed = "model", "requests", "cache", "prompt", "tokens", "runs", "count_experts"
    given.passed = ["--rows", *map(str, given.rows)]
    for name in passed:
        if (value := getattr(given, name)) is not None:
            given.passed += [f"--{name.replace('_', '-')}", str(value)]
    given.passed += ["--unchecked"] * given.unchecked
    return given


def main() -> int:
    given = parse()
    register_format()
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    placements = list(fitting(given))
    if given.rates is None:
        rates = measured(given.device, SHAPES[given.model], placements)
        print(
            f"copies run at {rates.copy / 1e12:.2f} TB/s, products at "
            f"{rates.multiply / 1e12:.0f} T operations/s; exchanges of the fewest and "
            "most rows:"
        )
        for count, verbs in rates.exchanges.items():
            each = (f"{verb} {t[0]:.1f}, {t[-1]:.0f}" for verb, t in verbs.items())
            print(f"  {count} devices, us: {'; '.join(each)}", flush=True)
    else:
        end_with_parent()
        rates = Rates(**json.loads(given.rates.read_text()))
    run = run_together if given.together else run_here
    with tempfile.TemporaryDirectory() as folder:
        rows = run(given, placements, rates, Path(folder))
    first = rows[0]
    for row in rows:
        row["same"] = agreed(first["text"], row["text"])
    if given.json:
        found = {"model": given.model, "rates": asdict(rates), "placements": rows}
        given.json.write_text(json.dumps(found, indent=1))
    if given.rates is None:
        print(f"\n{given.model}, bfloat16: found (limit)\n\n{table(rows, given)}\n")
        same = ", ".join(f"{row['placement']} {row['same']}" for row in rows)
        print(f"first tokens as {first['placement']}, of {given.tokens}: {same}")
    return 0 if all(row.get("right", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
