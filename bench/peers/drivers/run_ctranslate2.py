"""CTranslate2: a static batch."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import Answered, Facts, Loaded, main


def load(job: dict[str, Any]) -> Loaded:
    import ctranslate2

    generator = ctranslate2.Generator(
        job["model"],
        compute_type=job["mode"],
        inter_threads=1,
        intra_threads=job["threads"],
    )
    # It takes tokens as strings alone.
    path = Path(job["model"]) / "vocabulary.json"
    names = json.loads(path.read_text("utf-8"))

    def answer(prompts: list[list[int]], tokens: int) -> Answered:
        began = time.perf_counter()
        first: list[float] = []

        def on_token(_: object) -> bool:
            if not first:
                first.append(time.perf_counter() - began)
            return False

        found = generator.generate_batch(
            [[names[token] for token in prompt] for prompt in prompts],
            beam_size=1,
            sampling_topk=1,
            min_length=tokens,
            max_length=tokens,
            include_prompt_in_result=False,
            callback=on_token,
        )
        return Answered([list(each.sequences_ids[0]) for each in found], first[0])

    return Loaded(
        answer,
        lambda: Facts(
            {"ctranslate2": version("ctranslate2")},
            f"{generator.compute_type}, static batch",
        ),
    )


if __name__ == "__main__":
    main(load)
