"""PEFT folders with random adapters of a tiny Llama, and its merged weights."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Every linear layer of a decoder layer."""


def modules(tensors, targets=TARGETS):
    """Names and shapes [N, K] of the layers that ``targets`` name."""
    found = {name.removesuffix(".weight"): x.shape for name, x in tensors.items()}
    ends = tuple(f".{target}_proj" for target in targets)
    return {name: shape for name, shape in found.items() if name.endswith(ends)}


class LoraFiles:
    """A random adapter of the layers of a tiny model."""

    def __init__(self, tensors, *, seed, rank=4, alpha=6.0, targets=TARGETS, rs=False):
        rng = np.random.default_rng(seed)
        self.rank, self.rs = rank, rs
        self.config = {
            "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rs,
            "target_modules": [f"{each}_proj" for each in targets], "bias": "none",
            "base_model_name_or_path": "tiny", "lora_dropout": 0.1,
            "task_type": "CAUSAL_LM", "inference_mode": True, "modules_to_save": None,
        }  # fmt: skip
        self.pairs = {}
        for name, (rows, columns) in modules(tensors, targets).items():
            a = rng.standard_normal((rank, columns)) / columns**0.5
            b = rng.standard_normal((rows, rank)) / rank**0.5
            self.pairs[name] = a.astype(np.float32), b.astype(np.float32)

    @property
    def scale(self):
        return self.config["lora_alpha"] / (self.rank**0.5 if self.rs else self.rank)

    def tensors(self):
        return {
            f"base_model.model.{name}.lora_{letter}.weight": matrix
            for name, pair in self.pairs.items()
            for letter, matrix in zip("AB", pair, strict=True)
        }

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors(), folder / "adapter_model.safetensors")
        return folder

    def merged(self, tensors):
        """The model's weights with the adapter added, float64."""
        merged = {name: x.astype(np.float64) for name, x in tensors.items()}
        for name, (a, b) in self.pairs.items():
            product = b.astype(np.float64) @ a.astype(np.float64)
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + self.scale * product
        return merged
