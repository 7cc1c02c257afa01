"""OpenVINO GenAI on its CPU device: paged attention and continuous batching."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from harness import Answered, Facts, Loaded, main


def load(job: dict[str, Any]) -> Loaded:
    import numpy as np
    import openvino
    import openvino_genai as genai

    schedule = genai.SchedulerConfig()
    schedule.max_num_seqs = max([1, *job["batches"]])
    schedule.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": job["threads"]}
    pipe = genai.ContinuousBatchingPipeline(job["model"], schedule, "CPU", properties)

    def answer(prompts: list[list[int]], tokens: int) -> Answered:
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        ids = [openvino.Tensor(np.array([each], np.int64)) for each in prompts]
        found = pipe.generate(ids, [config] * len(ids))
        first = found[0].perf_metrics.get_ttft().mean / 1000
        return Answered([list(each.m_generation_ids[0]) for each in found], first)

    precisions = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    names = ("openvino-genai", "openvino")
    return Loaded(
        answer,
        lambda: Facts(
            {name: version(name) for name in names},
            f"{job['mode']}, paged attention, precisions by default; instructions "
            f"chosen by oneDNN; the device computes in {' '.join(sorted(precisions))}",
        ),
    )


if __name__ == "__main__":
    main(load)
