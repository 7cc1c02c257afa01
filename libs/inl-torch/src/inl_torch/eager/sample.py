"""Choosing the next token."""

from __future__ import annotations

import torch

from inl.spec.kernel import Kernel
from inl.spec.values import Step, Tables


def choose(
    logits: torch.Tensor, step: Step, tables: Tables, *, sampler: str
) -> tuple[torch.Tensor, Tables]:
    slots = step.slots.long()
    tokens = logits.argmax(-1)
    if sampler == "draw":
        temperature = _temperature(step, slots, tables)
        drawn = _draw(logits.float(), step.uniforms.view(torch.float32), temperature)
        tokens = torch.where(temperature > 0, drawn, tokens)
    chosen = tokens.int()
    tables.last.index_copy_(0, slots, chosen.view(slots.shape[0], -1)[:, -1])
    return chosen, tables


def _temperature(step: Step, slots: torch.Tensor, tables: Tables) -> torch.Tensor:
    width = step.samples.shape[0] // slots.shape[0]
    rows = tables.params[:, 0].index_select(0, slots)
    spread: torch.Tensor = rows.unsqueeze(1).expand(-1, width).reshape(-1)
    return spread


def _draw(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    scaled = logits / temperature.masked_fill(temperature <= 0, 1.0).unsqueeze(1)
    mass = (scaled - scaled.amax(-1, keepdim=True)).exp_().cumsum(-1)
    below = mass <= uniform.unsqueeze(1) * mass[:, -1:]
    drawn: torch.Tensor = below.sum(-1).clamp(max=logits.shape[-1] - 1)
    return drawn


def mask_logits(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    index = torch.arange(logits.shape[-1], device=logits.device)
    words = masks.index_select(1, index // 32)
    allowed = (words >> (index % 32).int()) & 1
    return logits.float().masked_fill(allowed == 0, -1e30)


KERNELS = (
    Kernel("choose", "eager", choose),
    Kernel("mask_logits", "eager", mask_logits, invariant=True),
)
