"""What rounding on the CPU costs: perplexity and agreement beside plain float32.

``python bench/cpu_quality.py`` reads a text of this repository with the default model.
The yardstick is the NumPy reference: the same weights, decoded to float32. Each mode
of the CPU backend is then compared with it, token for token, on the same text.
``--llama-cpp`` compares llama.cpp as well, by ``llama-cpp-python`` in this environment.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np

from inl import Device, EngineConfig
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.runners.local_runner import start_runner
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket

HERE = Path(__file__).parents[1]
TEXTS = [
    HERE / name
    for name in (
        "LICENSE",
        "README.md",
        "ARCHITECTURE.md",
        "docs/how-it-works.md",
        "docs/inl.md",
        "core/src/inl/scheduling/scheduler.py",
    )
]
MODES = {
    "float32": ("float32", "", "auto"),
    "float32, cache int8": ("float32", "", "int8"),
    "float32, cache fp8": ("float32", "", "fp8"),
    "bfloat16, inputs int16": ("bfloat16", "int16", "auto"),
    "bfloat16, inputs int8": ("bfloat16", "int8", "auto"),
    "the same, cache int8": ("bfloat16", "int8", "int8"),
    "the same, cache fp8": ("bfloat16", "int8", "fp8"),
}


def logits_of(runner, ids, chunk):
    """Logits after each token, a chunk of them at a time."""
    limits = runner.limits
    table = [list(range(1, 1 + limits.max_blocks_per_seq))] * limits.groups
    runner.submit(
        admit_frame(
            1, table, groups=limits.groups, max_blocks_per_seq=limits.max_blocks_per_seq
        )
    )
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        message = step_frame(
            Bucket(len(part), 1, tokens_per_row=len(part)),
            [Row(1, part)],
            step=start,
            groups=limits.groups,
            block_size=limits.block_size,
            decode_rows=0,
        )
        yield runner.logits(message).data.astype(np.float64)


def open_runner(language, device, dtype, tokens, kv_dtype="auto"):
    config = EngineConfig(
        backend=device, dtype=dtype, kv_dtype=kv_dtype, max_batch=1, context=tokens,
        sampling="greedy",
    )  # fmt: skip
    return start_runner(language, make_backend(Device(device)), config)


def llama_cpp_logits(path, texts, chunk):
    """Logits by llama.cpp after each token of each text."""
    from llama_cpp import Llama

    longest = max(len(ids) for ids in texts)
    llama = Llama(
        str(path), n_ctx=longest, n_batch=chunk, n_ubatch=chunk, logits_all=True,
        n_threads_batch=os.cpu_count(), verbose=False,
    )  # fmt: skip
    for ids in texts:
        llama.reset()
        llama.eval(ids)
        yield np.array(llama.scores[: len(ids)], np.float64)


def log_probabilities(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare(language, texts, device, modes, chunk, llama_cpp=None):
    """One row a mode, the reference first; every text begins anew.

    llama_cpp: the file that llama.cpp opens too.
    """
    longest = max(len(ids) for ids in texts)

    def read(*place, chunk=chunk):
        runner = open_runner(language, *place)
        for ids in texts:
            logits = logits_of(runner, ids, chunk)
            yield np.concatenate([log_probabilities(part) for part in logits])[:-1]
        runner.close()

    # The reference computes rows alike in any number, and many in less time.
    exact = list(read("reference", "float32", longest, chunk=max(chunk, 128)))
    rows = {"reference float32": judge(exact, exact, texts)}
    for mode in modes:
        dtype, inputs, kv_dtype = MODES[mode]
        os.environ["INL_CPU_INPUTS"] = inputs
        rows[mode] = judge(read(device, dtype, longest, kv_dtype), exact, texts)
    if llama_cpp is not None:
        logits = llama_cpp_logits(llama_cpp, texts, chunk)
        found = (log_probabilities(each)[:-1] for each in logits)
        rows["llama.cpp"] = judge(found, exact, texts)
    first = rows["reference float32"]
    for row in rows.values():
        row["ratio"] = row["perplexity"] / first["perplexity"]
        ratios = np.exp(np.subtract(row["losses"], first["losses"]))
        row["ratios"] = [float(ratios.min()), float(ratios.max())]
    return rows


def judge(found, exact, texts):
    """Perplexity of all texts, share of equal choices, divergence from exact."""
    losses, agreed, apart = [], [], []
    for logs, truth, ids in zip(found, exact, texts, strict=True):
        nexts = np.array(ids[1:])
        losses.append(-logs[np.arange(len(nexts)), nexts])
        agreed.append(logs.argmax(-1) == truth.argmax(-1))
        apart.append((np.exp(truth) * (truth - logs)).sum(-1))
    return {
        "perplexity": float(np.exp(np.concatenate(losses).mean())),
        "greedy_agreement": float(np.concatenate(agreed).mean()),
        "mean_kl": float(np.concatenate(apart).mean()),
        "losses": [float(loss.mean()) for loss in losses],
    }


def span(ratios):
    """From the best text to the worst."""
    return " to ".join(f"{100 * (ratio - 1):+.2f}" for ratio in ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS[:1])
    parser.add_argument(
        "--all", action="store_true", help=f"{len(TEXTS)} texts of this repository"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--chunk",
        type=int,
        default=16,
        help="tokens of a step: few rows are computed as in decoding, many otherwise",
    )
    parser.add_argument("--llama-cpp", action="store_true", help="of a GGUF file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    place = resolve_model(given.model)
    language = open_model(place)
    tokenizer, paths = language.checkpoint.tokenizer(), given.text
    if given.all:
        paths = TEXTS
    texts = [
        tokenizer.encode(path.read_text("utf-8"))[: given.tokens] for path in paths
    ]
    llama_cpp = place if given.llama_cpp else None
    rows = compare(language, texts, given.device, given.modes, given.chunk, llama_cpp)
    if given.json:
        print(json.dumps(rows))
        return
    names = ", ".join(path.name for path in paths)
    print(
        f"{language.name}, {sum(map(len, texts))} tokens of {names}, "
        f"{given.chunk} a step, {given.device}"
    )
    for mode, row in rows.items():
        print(
            f"{mode:<24} perplexity {row['perplexity']:9.4f} "
            f"({100 * (row['ratio'] - 1):+.3f} %, {span(row['ratios'])})  "
            f"same greedy token {100 * row['greedy_agreement']:6.2f} %  "
            f"mean KL {row['mean_kl']:.2e}"
        )


if __name__ == "__main__":
    main()
