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
    pieces: str = "".join(engine.stream("more", stop=["\n"]))
    return [str(single), from_ids.text, pieces, *(item.text for item in several)]
