"""Speed with the layer of a checkpoint that predicts further tokens, as by default.

    python bench/mtp.py [--device cpu:0] [--shape mtp] [--rows 1 8 64]
    python bench/mtp.py --device cuda:0 --shape 8b --rows 1 8 64 256

Random weights of a shape, whose text repeats one token, with a random layer: it is
computed as a trained one, and its drafts are replaced by others of which
``--acceptance`` are right. The engine measures its table at the start and chooses, as
without any option. Runs with and without (``speculation=None``) alternate; the fastest
of each counts, of whole requests with their prompts, and after the first tokens.
Outputs are equal.
``--cpu-time`` fills the table with processor time, for a machine that others share;
with one processor (``taskset -c 0``) both tables and runs are then of one thread.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from typing import Any, NamedTuple

from random_models import SHAPES, random_language
from speculation import print_times
from speculation_shapes import Repeating

from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.spec.op import Spec
from inl.speculation import eagle_drafter, step_times
from inl.speculation.drafters import SyntheticDrafter

LAST = "model.layers.0."


def with_layer(name: str, layers: int) -> Any:
    """Return a shape's model whose files have a layer that predicts further tokens."""
    found = random_language(name, layers=layers)
    given: Any = found.checkpoint
    size = found.config.hidden_size
    specs = dict(given.specs)
    for source, spec in given.specs.items():
        if source.startswith(LAST):
            specs[f"mtp.layers.0.{source.removeprefix(LAST)}"] = spec
    specs["mtp.fc.weight"] = Spec((size, 2 * size), "bfloat16")
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        specs[f"mtp.{norm}.weight"] = Spec((size,), "bfloat16")
    return replace(found, checkpoint=Repeating(given.config, specs))


def with_synthetic(engine: InferenceEngine, drafter: SyntheticDrafter) -> None:
    """Replace the drafts of an engine's layer, which is computed all the same."""
    if engine.speculation is None:
        return
    computed: Any = engine.speculation.drafter
    propose, run = computed.propose, computed._run
    computed.steps = 0

    def counted(*args: Any, **options: Any) -> Any:
        computed.steps += 1
        return run(*args, **options)

    def proposed(queries: Any) -> list[Any]:
        pairs = zip(propose(queries), drafter.propose(queries), strict=True)
        return [known[: len(drafts)] for drafts, known in pairs]

    computed.propose, computed._run = proposed, counted


class Timed(NamedTuple):
    """Times of all prompts at once."""

    whole: float
    """Seconds of the requests."""
    later: float
    """Seconds from the last first token to the end."""
    cpu: float
    """Processor time of the requests."""
    later_cpu: float
    outputs: list[tuple[int, ...]]


def timed(engine: InferenceEngine, prompts: list[list[int]], tokens: int) -> Timed:
    """Generate from all prompts."""
    began, cpu = time.perf_counter(), time.process_time()
    handles = [
        engine.submit(prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts
    ]
    while not all(handle.token_ids for handle in handles):
        engine.step()
    first, first_cpu = time.perf_counter(), time.process_time()
    while not all(handle.completed for handle in handles):
        engine.step()
    end, end_cpu = time.perf_counter(), time.process_time()
    outputs = [handle.completion().token_ids for handle in handles]
    return Timed(end - began, end - first, end_cpu - cpu, end_cpu - first_cpu, outputs)


def main() -> None:
    """Print the table of times, then one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--shape", default="mtp", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    if given.cpu_time:
        step_times.perf_counter = eagle_drafter.perf_counter = time.process_time
    language, rows = with_layer(given.shape, given.layers), max(given.rows)
    config = language.config
    context = given.prompt + given.tokens + 8
    per_token = 2 * 4 * config.layers * config.kv_heads * config.head_dim
    settings = EngineConfig(
        backend=given.device, max_batch=rows, dtype=given.dtype, prefix_cache=False,
        context=context, check_weights=False,
        cache_bytes=(rows + 8) * (context + 32) * per_token,
    )  # fmt: skip
    numbers = random.Random(7)
    prompts = [
        [numbers.randrange(config.vocab_size) for _ in range(given.prompt)]
        for _ in range(rows)
    ]
    texts = {tuple(prompt): prompt[-1:] * given.tokens for prompt in prompts}
    plain = InferenceEngine(language, config=replace(settings, speculation=None))
    drafting = InferenceEngine(language, config=settings)
    with_synthetic(drafting, SyntheticDrafter(texts, given.acceptance))
    counts = drafting.speculation
    print(f"speculation: {counts and drafting.config.speculation}", flush=True)
    if counts is not None:
        print_times(drafting)
        head: Any = counts.drafter
        for size, seconds in head._times.seconds.items():
            print(f"{size:16} {1000 * seconds:10.2f} ms of the layer")
    for count in given.rows:
        pairs = []
        before, ran = (0, 0), 0
        if counts is not None:
            before = counts.drafted, counts.accepted
            ran = -head.steps
        for run in range(given.runs + 1):
            one = timed(plain, prompts[:count], given.tokens)
            two = timed(drafting, prompts[:count], given.tokens)
            assert one.outputs == two.outputs, "the same tokens with and without"
            pairs += [(one, two)] if run else []  # the first one compiles
        ratios = [
            min(one[of] for one, _ in pairs) / min(two[of] for _, two in pairs)
            for of in range(4)
        ]
        speed = count * given.tokens / min(one.whole for one, _ in pairs)
        drafted = accepted = 0
        if counts is not None:
            drafted, accepted = counts.drafted - before[0], counts.accepted - before[1]
            ran += head.steps
        print(
            f"{count:4} rows: {speed:8.1f} tokens/s without, {ratios[0]:5.2f} times "
            f"with, {ratios[1]:5.2f} after the first tokens (processor time "
            f"{ratios[2]:5.2f} and {ratios[3]:5.2f}); {ran} steps of the layer, "
            f"drafted {drafted}, accepted {accepted / max(drafted, 1):.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
