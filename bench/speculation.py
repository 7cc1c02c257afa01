"""Speed of speculation on one device, against no speculation in the same process.

Prints the measured times of steps, from which the number of drafts is chosen, then
decoding speed for several kinds of text. Runs with and without drafts alternate, and
the fastest of each counts, so that other load on the machine matters less. Outputs of
every pair are compared: in 16 bits they are equal up to rounding, and the share of
equal ones is printed; others are an error in float32 and in the invariant mode.

    python bench/speculation.py [--model NAME] [--device cpu] [--tokens 128] [--runs 3]
    python bench/speculation.py --device cuda:0 --dtype float32
    python bench/speculation.py --model LARGE --draft-model SMALL [--draft-device cpu]
    python bench/speculation.py --device cuda:0 --shape 8b --rows 1 32 256

``--shape`` takes random weights of a model's shape, whose text repeats one token, and
synthetic drafts of which 0.8 are right.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.speculation.drafters import Drafter, SyntheticDrafter

CODE = '''\
def load_config(path):
    """Read the settings of the service from a JSON file."""
    with open(path) as file:
        data = json.load(file)
    for key, value in data.items():
        if value is None:
            raise ValueError(f"missing value for {key} in {path}")
    return data


def save_config(path, data):
    """Write the settings of the service to a JSON file."""
    with open(path, "w") as file:
        json.dump(data, file, indent=2, sort_keys=True)
    print(f"saved {len(data)} settings to {path}")
    return len(data)


def merge_config(first, second):
    """Return the settings of both, those of the second one preferred."""
    merged = dict(first)
    for key, value in second.items():
        if key in merged and merged[key] != value:
            print(f"setting {key} changes from {merged[key]} to {value}")
        merged[key] = value
    return merged
'''
EDIT = (
    f"```python\n{CODE}```\n\nHere is the same file again, with the word settings "
    f"replaced by options:\n\n```python\n"
)
WRITE = (
    "# A parser of arithmetic expressions in Python, with precedence.\n\nimport re\n"
)


class Timed(NamedTuple):
    """One run of all prompts."""

    seconds: float
    """Per token."""
    cpu: float
    """CPU time of all threads per token, which other load disturbs less."""
    outputs: list[tuple[int, ...]]


def generate(
    engine: InferenceEngine, prompts: Sequence[list[int]], tokens: int
) -> Timed:
    """Generate from all prompts at once; the time starts after the first tokens."""
    handles = [
        engine.submit(prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts
    ]
    while not all(handle.token_ids for handle in handles):
        engine.step()
    began, cpu = time.perf_counter(), time.process_time()
    done = sum(len(handle.token_ids) for handle in handles)
    while not all(handle.completed for handle in handles):
        engine.step()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    outputs = [handle.completion().token_ids for handle in handles]
    made = sum(map(len, outputs)) - done
    return Timed(seconds / made, cpu / made, outputs)


def print_times(engine: InferenceEngine) -> None:
    """Print the times from which an engine chooses the number of drafts."""
    assert engine.speculation is not None, "its config asks for it"
    times = engine.speculation.times
    assert times is not None, "drafts are adaptive by default"
    for title, table in (
        ("without drafts", times.plain), ("verifying", times.seconds),
    ):  # fmt: skip
        print(f"tokens, {title:16} ms   ms per token")
        for tokens, seconds in table.items():
            ms = 1000 * seconds
            print(f"{tokens:16} {ms:10.2f} {ms / tokens:14.3f}")


class Bench:
    """Two engines on one model; ``args``: the parsed command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = EngineConfig(
            backend=args.device, max_batch=8, context=2048, prefix_cache=False,
            dtype=args.dtype, invariant=args.invariant,
        )  # fmt: skip
        self.plain = InferenceEngine.from_pretrained(args.model, self.config)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self.plain.tokenizer.encode(text))

    def compare(
        self,
        name: str,
        prompts: Sequence[list[int]],
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> None:
        """Print the speed of both engines on these prompts.

        settings: of the drafting engine, n-grams by default.
        """
        args = self.args
        if args.only and args.only not in name:
            return
        config = replace(self.config, **{"speculation": "ngram", **settings})
        engine = InferenceEngine(self.plain.model, config=config, drafter=drafter)
        pairs = [
            (
                generate(self.plain, prompts, args.tokens),
                generate(engine, prompts, args.tokens),
            )
            for _ in range(args.runs + 1)
        ]
        equal = [
            first == second
            for one, other in pairs
            for first, second in zip(one.outputs, other.outputs, strict=True)
        ]
        is_exact = args.invariant or args.dtype == "float32"
        assert all(equal) or not is_exact, name
        slow = min(one.seconds for one, _ in pairs[1:])
        fast = min(other.seconds for _, other in pairs[1:])
        work = min(one.cpu for one, _ in pairs[1:])
        work /= min(other.cpu for _, other in pairs[1:])
        counts = engine.speculation
        assert counts is not None, "its config asks for it"
        rate = counts.accepted / counts.drafted if counts.drafted else 0.0
        print(
            f"{name:34} {1 / slow:8.1f} {1 / fast:8.1f} tok/s {slow / fast:6.2f} x "
            f"(CPU {work:5.2f} x)  drafted {counts.drafted:5}, accepted {rate:4.0%}, "
            f"equal {sum(equal)} of {len(equal)}"
        )
        # The model's files stay open for the next comparison.
        engine.runner.close()

    def print_times(self) -> None:
        """Print the times of steps by their number of tokens."""
        config = replace(self.config, speculation="ngram")
        engine = InferenceEngine(self.plain.model, config=config)
        print_times(engine)
        engine.runner.close()

    def synthetic(self, prompts: Sequence[list[int]], acceptance: float) -> Drafter:
        """Return a drafter of the outputs of these prompts."""
        outputs = generate(self.plain, prompts, self.args.tokens).outputs
        pairs = zip(prompts, outputs, strict=True)
        texts = {tuple(prompt): output for prompt, output in pairs}
        return SyntheticDrafter(texts, acceptance)


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="part of the name of what to compare")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--draft-model", help="smaller model with the same tokenizer")
    parser.add_argument("--draft-device", help="device of the draft model")
    parser.add_argument("--shape", help="random weights: smollm2 or 8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--acceptance", type=float, default=0.8)
    args = parser.parse_args()
    if args.shape:
        from speculation_shapes import compare_shape

        compare_shape(args)
        return
    bench = Bench(args)
    bench.print_times()
    print(f"\n{'':34} {'without':>8} {'with':>8}")
    numbers = random.Random(7)
    vocab = bench.plain.runner.limits.vocab
    noise = [[numbers.randrange(vocab) for _ in range(200)] for _ in range(8)]
    bench.compare("n-gram, editing code, 1 row", [bench.ids(EDIT)])
    if args.draft_model:
        settings = {
            "speculation": "model", "draft_model": args.draft_model,
            "draft_backend": args.draft_device,
        }  # fmt: skip
        bench.compare("draft model, editing code", [bench.ids(EDIT)], **settings)
        bench.compare("draft model, writing code", [bench.ids(WRITE)], **settings)
    bench.compare("n-gram, random prompt, 1 row", noise[:1])
    bench.compare("n-gram, random prompts, 8 rows", noise)
    for rows in (1, 8):
        drafter = bench.synthetic(noise[:rows], 0.8)
        bench.compare(f"synthetic 0.8, {rows} row(s)", noise[:rows], drafter)
    bench.plain.close()


if __name__ == "__main__":
    main()
