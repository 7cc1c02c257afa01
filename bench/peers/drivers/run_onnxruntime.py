"""ONNX Runtime GenAI: a static batch, the prompts' tokens appended at once."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from typing import Any

from harness import Answered, Facts, Loaded, main


def load(job: dict[str, Any]) -> Loaded:
    import numpy as np
    import onnxruntime_genai as genai

    genai.disable_telemetry_events()
    config = genai.Config(job["model"])
    options = {"intra_op_num_threads": job["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = genai.Model(config)

    def answer(prompts: list[list[int]], tokens: int) -> Answered:
        began = time.perf_counter()
        length = len(prompts[0]) + tokens
        params = genai.GeneratorParams(model)
        params.set_search_options(
            do_sample=False,
            batch_size=len(prompts),
            min_length=length,
            max_length=length,
        )
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first = time.perf_counter() - began
        for _ in range(tokens - 1):
            generator.generate_next_token()
        size = len(prompts[0])
        rows = range(len(prompts))
        return Answered(
            [generator.get_sequence(row)[size:].tolist() for row in rows], first
        )

    names = ("onnxruntime-genai", "onnxruntime")
    return Loaded(
        answer,
        lambda: Facts(
            {name: version(name) for name in names},
            f"{job['mode']}, CPU provider, static batch",
        ),
    )


if __name__ == "__main__":
    main(load)
