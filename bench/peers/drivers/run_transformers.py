"""transformers on torch: ``generate`` as it comes, a static batch."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from harness import Answered, Facts, Loaded, main


def load(job: dict[str, Any]) -> Loaded:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class FirstToken(BaseStreamer):
        """Notes when the second thing comes; the first is the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: object) -> None:
            if len(self.times) < 2:
                self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["mode"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()

    def answer(prompts: list[list[int]], tokens: int) -> Answered:
        began = time.perf_counter()
        streamer = FirstToken() if len(prompts) == 1 else None
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                streamer=streamer,
            )
        first = streamer.times[1] - began if streamer else None
        return Answered(found[:, ids.shape[1] :].tolist(), first)

    return Loaded(
        answer,
        lambda: Facts(
            {name: version(name) for name in ("transformers", "torch")},
            f"{job['mode']}, {model.config._attn_implementation} attention, static "
            "batch",
            weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        ),
    )


if __name__ == "__main__":
    main(load)
