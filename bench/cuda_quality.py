"""Accuracy of bfloat16 on a device, compared with transformers in bfloat16.

    python bench/cuda_quality.py MODEL.gguf tests/data/smollm2-oracle.json

Every case of the oracle is computed along its recorded tokens: the prompt in one step,
then one token per step with the cache, as an engine decodes, alone and batched. The
reference is transformers in float32 with the same dequantized weights, which must
reproduce the oracle's logits. Exits with 1 where INL's logits are more than 1.5 times
as far from the reference as those of transformers in bfloat16, or where the reference
differs from the oracle.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inl import EngineConfig
from inl.dtypes import widen
from inl.executor.model_loader import LanguageModel, open_model
from inl.plugin import make_backend
from inl.runners.local_runner import LocalRunner, start_runner
from inl.scheduling.buckets import Buckets
from inl.spec.message import Row, admit_frame, step_frame
from inl.weights.load import to_dtype

MOST = 1.5
"""Most distance of INL relative to that of transformers."""

SAME = 2e-3
"""Most difference of the reference from the oracle's logits, which reach about 20."""


class Distance(NamedTuple):
    """Distance of logits [N, V] from the reference."""

    rms: float
    """Root mean square of the differences, relative to that of the reference."""
    worst: float
    """Largest difference of a logit."""
    kl: float
    """Mean KL divergence of the next token's distribution, in nats."""
    same: float
    """Share of positions with the same most likely token."""


def distance(found: Any, exact: Any) -> Distance:
    apart = found - exact
    p, q = log_softmax(exact), log_softmax(found)
    return Distance(
        float(np.sqrt(np.mean(apart**2) / np.mean(exact**2))),
        float(np.abs(apart).max()),
        float((np.exp(p) * (p - q)).sum(-1).mean()),
        float((found.argmax(-1) == exact.argmax(-1)).mean()),
    )


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def transformers_model(language: LanguageModel, device: str) -> LlamaForCausalLM:
    """Load the checkpoint, dequantized by INL, into the transformers model."""
    files = language.checkpoint
    names = LlamaConfig().to_dict().keys() | {"rope_theta"}
    known = {name: value for name, value in files.config.items() if name in names}
    model = LlamaForCausalLM(LlamaConfig(**known))
    tensors = {
        name: torch.from_numpy(np.array(widen(to_dtype(files.tensor(name), "float32"))))
        for name in files.names()
    }
    missing, unused = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}, f"not loaded: {missing}"
    assert not unused, f"not used: {unused}"
    model.tie_weights()
    return model.to(device).eval()


def theirs(model: LlamaForCausalLM, case: dict[str, Any]) -> Any:
    """Logits after the prompt and after each token of the answer but the last."""
    ids = case["prompt_ids"] + case["token_ids"][:-1]
    with torch.inference_mode():
        batch = torch.tensor([ids], device=model.device)
        logits = model(batch).logits[0, len(case["prompt_ids"]) - 1 :]
    return logits.float().cpu().numpy().astype(np.float64)


class Ours:
    """Logits of a runner along given token sequences."""

    def __init__(self, language: LanguageModel, device: str, rows: int) -> None:
        config = EngineConfig(
            backend=device, dtype="bfloat16", max_batch=rows, context=256,
            sampling="greedy",
        )  # fmt: skip
        self.runner: LocalRunner = start_runner(language, make_backend(device), config)
        self.steps = 0

    def logits(self, cases: list[dict[str, Any]]) -> list[Any]:
        """Like :func:`theirs` for all cases, batched in the same steps."""
        limits = self.runner.limits
        for slot in range(1, len(cases) + 1):
            first = 1 + (slot - 1) * limits.max_blocks_per_seq
            table = [list(range(first, first + limits.max_blocks_per_seq))]
            self.runner.submit(
                admit_frame(
                    slot, table, groups=1, max_blocks_per_seq=limits.max_blocks_per_seq
                )
            )
        found: list[list[Any]] = [[] for _ in cases]
        for slot, case in enumerate(cases):
            (row,) = self._step([Row(slot + 1, case["prompt_ids"])], decoding=0)
            found[slot].append(row)
        longest = max(len(case["token_ids"]) for case in cases)
        for place in range(longest - 1):
            live = [i for i, c in enumerate(cases) if place < len(c["token_ids"]) - 1]
            rows = [Row(i + 1, [cases[i]["token_ids"][place]]) for i in live]
            for slot, row in zip(live, self._step(rows, len(rows)), strict=True):
                found[slot].append(row)
        return [np.stack(rows) for rows in found]

    def _step(self, rows: list[Row], decoding: int) -> list[Any]:
        limits = self.runner.limits
        tokens = sum(len(row.tokens) for row in rows)
        sizes = Buckets(limits, token_budget=512, max_rows=limits.slots - 1)
        self.steps += 1
        frame = step_frame(
            sizes.choose(tokens, len(rows), "greedy"), rows, step=self.steps, groups=1,
            block_size=limits.block_size, decode_rows=decoding,
        )  # fmt: skip
        return list(widen(self.runner.logits(frame))[: len(rows)].astype(np.float64))


def is_oracle(exact: Any, case: dict[str, Any]) -> bool:
    """Whether logits after a prompt equal those of the oracle."""
    found = exact[0][case["top10_ids"]]
    return bool(np.abs(found - np.array(case["top10_logits"])).max() < SAME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    cases = json.loads(given.oracle.read_text())["cases"]
    language = open_model(given.model)
    torch.set_float32_matmul_precision("highest")
    model = transformers_model(language, given.device)
    exact = [theirs(model, case) for case in cases]
    right = [is_oracle(*pair) for pair in zip(exact, cases, strict=True)]
    model = model.to(torch.bfloat16)
    whole = np.concatenate(exact)
    rows = {
        "transformers": distance(
            np.concatenate([theirs(model, case) for case in cases]), whole
        )
    }
    ours = Ours(language, given.device, len(cases))
    alone = [ours.logits([case])[0] for case in cases]
    rows["ours, one at a time"] = distance(np.concatenate(alone), whole)
    rows["ours, together"] = distance(np.concatenate(ours.logits(cases)), whole)
    print(
        f"{language.name} on {given.device}, {len(whole)} places of {len(cases)} texts"
    )
    print(f"yardstick equals the oracle: {sum(right)} of {len(cases)} prompts")
    print(f"{'bfloat16':<22}{'rms':>10}{'worst':>9}{'KL':>11}{'same':>8}{'ratio':>7}")
    base = rows["transformers"].rms
    for name, found in rows.items():
        print(f"{name:<22}{found.rms:>10.2e}{found.worst:>9.3f}{found.kl:>11.2e}"
              f"{found.same:>8.2%}{found.rms / base:>7.2f}")  # fmt: skip
    holds = all(found.rms <= MOST * base for found in rows.values())
    print("holds" if holds and all(right) else "BROKEN", f"(at most {MOST} times)")
    return 0 if holds and all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
