"""Prompts and decoding of a shape of Mamba-2 with random weights.

    python bench/mamba2.py [--device cpu:0] [--prompts 512 2048] [--dtype bfloat16]
    python bench/mamba2.py --device cuda:0 --prompts 512 2048 32768 131072 --peer
    python bench/mamba2.py --device cuda:0 --prompts 2048 32768 --warm

One request at a time: seconds of a prompt to its first token, and milliseconds of each
of ``--tokens`` later ones, from the first token to the last. All layers but one are
recurrent, so that the time of a token hardly grows with the context. ``--peer``
measures the same shape in transformers, by torch alone, on the same device: its prompts
take 4 MiB of memory a token and layer, so that longer ones than ``--most`` are left
out. ``--cpu-time`` counts processor time of all threads, for a machine that others
share. ``--warm`` measures the first token of a prompt that was not seen, with and
without snapshots of recurrent state, and of the same prompt with 16 tokens more.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from random_models import FIELDS, RECURRENT, SHAPES, random_language

from inl import EngineConfig, InferenceEngine

SHAPE = "mamba2"


def prompt_of(count):
    return [int(x) for x in np.random.default_rng(count).integers(9, 30000, count)]


def clock_of(given):
    return time.process_time if given.cpu_time else time.perf_counter


def timed(run, given):
    clock = clock_of(given)
    began = clock()
    run()
    return clock() - began


def measured(name, given, generate):
    """Print the times of each prompt; generate: (ids, tokens) -> the time of each."""
    clock = clock_of(given)
    for count in given.prompts:
        ids = prompt_of(count)
        generate(ids, 2)  # compiles
        firsts, each = [], []
        for _ in range(given.runs):
            began = clock()
            times = generate(ids, 1 + given.tokens)
            firsts.append(times[0] - began)
            each.append((times[-1] - times[0]) / given.tokens)
        print(
            f"{name:>12} {count:>7} tokens: {min(firsts):8.3f} s, "
            f"{count / min(firsts):9.0f} tokens/s; {1e3 * min(each):8.3f} ms a token",
            flush=True,
        )


def ours(given):
    context = max(given.prompts) + given.tokens + 64
    language = random_language(SHAPE, context, given.layers)
    config = EngineConfig(
        backend=given.device, max_batch=1, context=context, dtype=given.dtype,
        prefix_cache=False,
    )  # fmt: skip
    clock = clock_of(given)
    with InferenceEngine(language, config=config) as engine:

        def generate(ids, count):
            handle = engine.submit(ids, max_tokens=count, ignore_eos=True)
            times = []
            while len(times) < count:
                engine.step()
                times += [clock()] * (len(handle.token_ids) - len(times))
            return times

        measured("inl", given, generate)


def warm(given):
    """Print times to the first token of new and of continued prompts."""
    context = max(given.prompts) + given.tokens + 64
    language = random_language(SHAPE, context, given.layers)
    for size in ("0", "4GiB"):
        config = EngineConfig(
            backend=given.device, max_batch=1, context=context, dtype=given.dtype,
            snapshot_host=size,
        )  # fmt: skip
        with InferenceEngine(language, config=config) as engine:
            for count in given.prompts:
                times = turns(engine, count, given)
                new, again = (1e3 * min(each) for each in zip(*times, strict=True))
                taken = dict(engine.snapshots.counts) if engine.snapshots else {}
                print(
                    f"snapshots {size:>4} {count:>7} tokens: new {new:8.2f} ms, "
                    f"continued {again:8.2f} ms; {taken}",
                    flush=True,
                )


def turns(engine, count, given):
    """Return times of a new prompt, and of its next turn, of each run."""
    times, ids = [], prompt_of(count)
    for run in range(1 + given.runs):
        new = [run + 1, *ids[1:]]
        pair = [
            timed(lambda: engine.generate([each], max_tokens=1), given)  # noqa: B023
            for each in (new, [*new, *ids[:16]])
        ]
        times.append(pair)
    return times[1:]  # the first one compiles


def theirs(given):
    import torch
    from transformers import BambaConfig, BambaForCausalLM
    from transformers.cache_utils import DynamicCache

    fields = dict(zip(FIELDS, SHAPES[SHAPE], strict=True)) | RECURRENT[SHAPE]
    if given.layers:
        fields["num_hidden_layers"] = given.layers
    config = BambaConfig(**fields, max_position_embeddings=1 << 18)
    place = given.device.removesuffix(":0") if "cpu" in given.device else given.device
    dtype = getattr(torch, given.dtype)
    torch.set_default_dtype(dtype)
    with torch.device(place):
        model = BambaForCausalLM(config).eval()

    def generate(ids, count):
        ids = torch.tensor([ids], device=place)
        cache, times = DynamicCache(config=config), []
        for _ in range(count):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            ids.tolist()  # waits for the device
            times.append(clock())
        return times

    given.prompts = [count for count in given.prompts if count <= given.most]
    clock = clock_of(given)
    with torch.inference_mode():
        measured("transformers", given, generate)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--most", type=int, default=2048)
    given = parser.parse_args()
    if given.warm:
        warm(given)
        return
    ours(given)
    if given.peer:
        theirs(given)


if __name__ == "__main__":
    main()
