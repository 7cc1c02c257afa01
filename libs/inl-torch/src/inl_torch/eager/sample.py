"""Choosing the next token."""

from __future__ import annotations

import torch

from inl.spec.kernel import Kernel
from inl.spec.step import PARAMS, TOP, Scores, Step, Tables


def sample(
    logits: torch.Tensor, step: Step, tables: Tables, *, sampler: str
) -> tuple[torch.Tensor, Tables]:
    slots = step.slots.long()
    if sampler == "sample_filtered":
        _count(step, slots, tables)
        logits = _penalized(logits.float(), slots, tables)
    tokens = logits.argmax(-1)
    if sampler != "greedy":
        width = step.samples.shape[0] // slots.shape[0]
        params = tables.params.index_select(0, slots).repeat_interleave(width, 0)
        temperature = params[:, :1]
        scaled = _scaled(logits.float(), temperature)
        mass = scaled.exp()
        if sampler == "sample_filtered" and _filters(params):
            mass = mass.masked_fill(~_kept(scaled, params), 0.0)
        drawn = _draw(mass, step.uniforms.view(torch.float32))
        tokens = torch.where(temperature[:, 0] > 0, drawn, tokens)
    chosen = tokens.int()
    tables.last.index_copy_(0, slots, chosen.view(slots.shape[0], -1)[:, -1])
    return chosen, tables


def _count(step: Step, slots: torch.Tensor, tables: Tables) -> None:
    first = step.starts[:-1].clamp(max=step.tokens.shape[0] - 1)
    fed = step.tokens.index_select(0, first).long()
    decoding = torch.arange(fed.shape[0], device=fed.device) < step.used_counts[0]
    counts = tables.token_counts[slots, fed] + 2 * decoding.int()
    # Set, not added: rows of padding all write what is there already.
    tables.token_counts.index_put_((slots, fed), counts)


def _penalized(
    logits: torch.Tensor, slots: torch.Tensor, tables: Tables
) -> torch.Tensor:
    counts = tables.token_counts.index_select(0, slots)
    columns = tables.params.index_select(0, slots).unsqueeze(-1).unbind(1)
    param = dict(zip(PARAMS, columns, strict=True))
    factor = param["repetition_penalty"]
    factor = torch.where((counts > 0) & (factor > 0), factor, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    answered = counts >> 1
    frequency = param["frequency_penalty"] * answered
    presence = param["presence_penalty"] * (answered > 0)
    bias = tables.bias.index_select(0, slots)
    penalized: torch.Tensor = logits - frequency - presence + bias
    return penalized


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted / temperature.masked_fill(temperature <= 0, 1.0)


def _filters(params: torch.Tensor) -> bool:
    """Whether any row may lose tokens; a device is not asked, for it would wait."""
    if params.device.type != "cpu":
        return True
    drawn = params[:, 0] > 0
    cut = (params[:, 1] >= 1) | (params[:, 2] < 1) | (params[:, 3] > 0)
    return bool((drawn & cut).any())


def _kept(scaled: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    top_k, top_p, min_p = params[:, 1:4].unsqueeze(-1).unbind(1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    mass = ordered.exp_()
    kept = (rank < top_k) | (top_k < 1)
    total = mass.masked_fill(~kept, 0.0).cumsum(-1)
    before = total.roll(1, -1)
    before[:, 0] = 0.0
    kept = kept & ((before < top_p * total[:, -1:]) | (top_p >= 1))
    kept = kept & (mass >= min_p)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _draw(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    total = mass.cumsum(-1)
    below = total <= uniform.unsqueeze(1) * total[:, -1:]
    drawn: torch.Tensor = below.sum(-1).clamp(max=mass.shape[-1] - 1)
    return drawn


def score(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    logits = logits.float()
    logs = logits.log_softmax(-1)
    top = _sortable(logits).topk(min(TOP, logits.shape[-1]), -1).indices
    chosen = logs.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    return Scores(chosen, top.int(), logs.gather(-1, top))


def _sortable(logits: torch.Tensor) -> torch.Tensor:
    """Whole numbers, no two alike, in the order of logits and then of falling ids.

    ``topk`` orders equal values as it likes, and a stable sort costs far more.
    """
    # Adding zero makes -0.0 and 0.0 one.
    bits = (logits + 0.0).view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (bits << 32) - ids


def mask_logits(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    index = torch.arange(logits.shape[-1], device=logits.device)
    words = masks.index_select(1, index // 32)
    allowed = (words >> (index % 32).int()) & 1
    return logits.float().masked_fill(allowed == 0, -1e30)


KERNELS = (
    Kernel("sample", "eager", sample),
    Kernel("mask_logits", "eager", mask_logits, invariant=True),
    Kernel("score", "eager", score),
)
