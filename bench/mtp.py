"""Speed with the layer of a checkpoint that predicts further tokens, as by default.

    python bench/mtp.py [--device cpu:0] [--shape mtp] [--rows 1 8 64]
    python bench/mtp.py --device cuda:0 --shape 8b --rows 1 8 64 256

Random weights of a shape, whose text repeats one token, with a random layer: it is
computed as a trained one, and its drafts are replaced by others of which
``--acceptance`` are right. The engine measures its table at the start and chooses, as
without any option. Runs with and without (``speculation=None``) alternate; seconds of
the whole request count, with its prompt, and the median of each. Outputs are equal.
``--cpu-time`` fills the table with processor time, for a machine that others share;
with one processor (``taskset -c 0``) both tables and runs are then of one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import Any

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
    propose = computed.propose

    def proposed(queries: Any) -> list[Any]:
        pairs = zip(propose(queries), drafter.propose(queries), strict=True)
        return [known[: len(drafts)] for drafts, known in pairs]

    computed.propose = proposed


def timed(
    engine: InferenceEngine, prompts: list[list[int]], tokens: int
) -> tuple[float, float, list[Any]]:
    """Return seconds, processor time and outputs of all prompts at once."""
    began, cpu = time.perf_counter(), time.process_time()
    done = engine.generate(prompts, max_tokens=tokens, ignore_eos=True)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return seconds, cpu, [each.token_ids for each in done]


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
        before = (counts.drafted, counts.accepted) if counts else (0, 0)
        for run in range(given.runs + 1):
            one = timed(plain, prompts[:count], given.tokens)
            two = timed(drafting, prompts[:count], given.tokens)
            assert one[2] == two[2], "the same tokens with and without"
            pairs += [(one, two)] if run else []  # the first one compiles
        slow, fast, work, less = (
            statistics.median(pair[at][of] for pair in pairs)
            for of in (0, 1) for at in (0, 1)
        )  # fmt: skip
        drafted, accepted = (
            (counts.drafted - before[0], counts.accepted - before[1])
            if counts
            else (0, 0)
        )
        print(
            f"{count:4} rows: {count * given.tokens / slow:8.1f} and "
            f"{count * given.tokens / fast:8.1f} tokens/s, {slow / fast:5.2f} times "
            f"(processor time {work / less:5.2f}); drafted {drafted}, "
            f"accepted {accepted / max(drafted, 1):.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
