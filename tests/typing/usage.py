"""What a user's own code looks like to a type checker; mypy --strict reads it."""

from __future__ import annotations

from inl import Completion, Device, DeviceType, EngineConfig, InferenceEngine


def answer(prompts: list[str]) -> list[str]:
    """Every spelling of ``generate`` has its own result type."""
    device: Device = Device(DeviceType.CPU, 0)
    config = EngineConfig(backend=device, dtype="bfloat16", max_batch=4)
    engine = InferenceEngine.from_pretrained("model.gguf", config)
    single: Completion = engine.generate("one", max_tokens=4)
    from_ids: Completion = engine.generate([1, 2, 3])
    several: list[Completion] = engine.generate(prompts, temperature=0.5, seed=1)
    engine.generate("one", top_q=0.9)  # type: ignore[call-overload]
    pieces: str = "".join(engine.stream("more", stop=["\n"]))
    return [str(single), from_ids.text, pieces, *(item.text for item in several)]


async def answer_together(engine: InferenceEngine, prompts: list[str]) -> str:
    """The async twins have the same types."""
    single: Completion = await engine.agenerate("one", top_p=0.9, stop_ids=[4])
    several: list[Completion] = await engine.agenerate(prompts, logprobs=3)
    pieces: list[str] = [piece async for piece in engine.astream([1, 2], top_k=4)]
    return single.text + several[0].text + "".join(pieces)
