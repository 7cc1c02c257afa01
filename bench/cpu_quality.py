"""What rounding on the CPU costs: perplexity and agreement beside plain float32.

``python bench/cpu_quality.py`` reads a text of this repository with the default model.
The yardstick is the NumPy reference: the same weights, decoded to float32. Each mode
of the CPU backend is then compared with it, token for token, on the same text.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np

from inl import Device, EngineConfig
from inl.plugin import make_backend
from inl.runtime.load import open_model, start_runner
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.values import Bucket
from inl.weights.hub import resolve_model

TEXT = Path(__file__).parents[1] / "LICENSE"
MODES = {
    "float32": ("float32", "", "auto"),
    "float32, cache int8": ("float32", "", "int8"),
    "bfloat16, inputs mixed": ("bfloat16", "mixed", "auto"),
    "the same, cache int8": ("bfloat16", "mixed", "int8"),
    "bfloat16, inputs int16": ("bfloat16", "int16", "auto"),
    "bfloat16, inputs int8": ("bfloat16", "int8", "auto"),
}


def logits_of(runner, ids, chunk):
    """Logits after each token, a chunk of them at a time."""
    limits = runner.limits
    table = [list(range(1, 1 + limits.width))] * limits.groups
    runner.submit(admit_frame(1, table, groups=limits.groups, width=limits.width))
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        message = step_frame(
            Bucket(len(part), 1, width=len(part)),
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


def log_probabilities(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare(language, ids, device, modes, chunk):
    """One row a mode, the reference first."""
    yardstick = open_runner(language, "reference", "float32", len(ids))
    exact = [log_probabilities(part) for part in logits_of(yardstick, ids, chunk)]
    rows = {"reference float32": judge(exact, exact, ids)}
    for mode in modes:
        dtype, inputs, kv_dtype = MODES[mode]
        os.environ["INL_CPU_INPUTS"] = inputs
        runner = open_runner(language, device, dtype, len(ids), kv_dtype)
        found = [log_probabilities(part) for part in logits_of(runner, ids, chunk)]
        rows[mode] = judge(found, exact, ids)
        runner.close()
    first = rows["reference float32"]["perplexity"]
    for row in rows.values():
        row["ratio"] = row["perplexity"] / first
    return rows


def judge(found, exact, ids):
    """Perplexity of the text, share of equal choices, divergence from exact."""
    logs, truth = np.concatenate(found)[:-1], np.concatenate(exact)[:-1]
    nexts = np.array(ids[1:])
    loss = -logs[np.arange(len(nexts)), nexts].mean()
    agree = (logs.argmax(-1) == truth.argmax(-1)).mean()
    divergence = (np.exp(truth) * (truth - logs)).sum(-1).mean()
    return {
        "perplexity": float(np.exp(loss)),
        "greedy_agreement": float(agree),
        "mean_kl": float(divergence),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--chunk",
        type=int,
        default=16,
        help="tokens of a step: few rows are computed as in decoding, many otherwise",
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    language = open_model(resolve_model(given.model))
    ids = language.checkpoint.tokenizer().encode(given.text.read_text("utf-8"))
    ids = ids[: given.tokens]
    rows = compare(language, ids, given.device, MODES, given.chunk)
    if given.json:
        print(json.dumps(rows))
        return
    print(
        f"{language.name}, {len(ids)} tokens of {given.text.name}, "
        f"{given.chunk} a step, {given.device}"
    )
    for mode, row in rows.items():
        print(
            f"{mode:<24} perplexity {row['perplexity']:9.4f} "
            f"({100 * (row['ratio'] - 1):+.3f} %)  "
            f"same greedy token {100 * row['greedy_agreement']:6.2f} %  "
            f"mean KL {row['mean_kl']:.2e}"
        )


if __name__ == "__main__":
    main()
