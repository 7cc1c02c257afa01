"""INL, in its own process and through its public engine."""

from __future__ import annotations

import os
from typing import Any

from harness import Answered, Facts, Loaded, main


def load(job: dict[str, Any]) -> Loaded:
    on_openvino = job["mode"] == "openvino"
    if on_openvino:
        os.environ["INL_XPU_RUNTIME"] = "openvino-cpu"
    from inl import EngineConfig, InferenceEngine

    dtype = "auto" if on_openvino else job["mode"]
    config = EngineConfig(
        backend="xpu:0" if on_openvino else "cpu",
        dtype=dtype,
        max_batch=max([1, *job["batches"]]),
        prefix_cache=False,
        context=1024,
        sampling="greedy",
    )
    engine = InferenceEngine.from_pretrained(job["model"], config=config)

    def answer(prompts: list[list[int]], tokens: int) -> Answered:
        found = engine.generate(prompts, max_tokens=tokens, ignore_eos=True)
        ids = [list(each.token_ids) for each in found]
        return Answered(ids, found[0].first_token_seconds)

    def facts() -> Facts:
        mode = f"dtype {dtype} on {engine.device}"
        if not on_openvino:
            from inl_cpu.selection import select_backend

            mode += f"; {select_backend().note}"
        return Facts(versions(), mode, weight_bytes(engine))

    return Loaded(answer, facts, close=engine.close)


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("inl-core", "inl-cpu", "torch", "openvino"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def weight_bytes(engine: Any) -> int | None:
    from inl.engine.benchmark import traffic
    from inl.runners.local_runner import LocalRunner

    if not isinstance(engine.runner, LocalRunner):
        return None
    return traffic(engine.runner).weights


if __name__ == "__main__":
    main(load)
