"""Token sampling and log probabilities."""

from __future__ import annotations

import torch

from inl.spec.kernel import Kernel
from inl.spec.step import INVALID_TOKEN, PARAMS, TOP, Scores, Step, Tables


def sample(
    logits: torch.Tensor, step: Step, tables: Tables, *, sampler: str
) -> tuple[torch.Tensor, Tables]:
    slots = step.slots.long()
    if sampler == "sample_filtered":
        _count_inputs(step, slots, tables)
        logits = _apply_penalties(logits.float(), slots, tables)
    tokens = logits.argmax(-1)
    # argmax treats NaN as the highest logit.
    valid = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()
    if sampler != "greedy":
        per_row = step.samples.shape[0] // slots.shape[0]
        params = tables.params.index_select(0, slots).repeat_interleave(per_row, 0)
        temperature = params[:, :1]
        scaled = _scale(logits.float(), temperature)
        mass = scaled.exp()
        if sampler == "sample_filtered" and _may_filter(params):
            mass = mass.masked_fill(~_keep_mask(scaled, params), 0.0)
        sampled = _sample_tokens(mass, step.uniforms.view(torch.float32))
        tokens = torch.where(temperature[:, 0] > 0, sampled, tokens)
    chosen = torch.where(valid, tokens, INVALID_TOKEN).int()
    last = chosen.view(slots.shape[0], -1)[:, -1].clamp(min=0)
    tables.last.index_copy_(0, slots, last)
    return chosen, tables


def _count_inputs(step: Step, slots: torch.Tensor, tables: Tables) -> None:
    """Count the input token of each decoding row as generated."""
    first = step.starts[:-1].clamp(max=step.tokens.shape[0] - 1)
    inputs = step.tokens.index_select(0, first).long()
    decoding = torch.arange(inputs.shape[0], device=inputs.device) < step.used_counts[0]
    counts = tables.token_counts[slots, inputs] + 2 * decoding.int()
    # Assigned, not added: all padding rows write the value that is already there.
    tables.token_counts.index_put_((slots, inputs), counts)


def _apply_penalties(
    logits: torch.Tensor, slots: torch.Tensor, tables: Tables
) -> torch.Tensor:
    counts = tables.token_counts.index_select(0, slots)
    columns = tables.params.index_select(0, slots).unsqueeze(-1).unbind(1)
    param = dict(zip(PARAMS, columns, strict=True))
    factor = param["repetition_penalty"]
    factor = torch.where((counts > 0) & (factor > 0), factor, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    generated = counts >> 1
    frequency = param["frequency_penalty"] * generated
    presence = param["presence_penalty"] * (generated > 0)
    bias = tables.bias.index_select(0, slots)
    penalized: torch.Tensor = logits - frequency - presence + bias
    return penalized


def _scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted / temperature.masked_fill(temperature <= 0, 1.0)


def _may_filter(params: torch.Tensor) -> bool:
    """Whether a row may filter tokens; always true on devices, to not synchronize."""
    if params.device.type != "cpu":
        return True
    random = params[:, 0] > 0
    filtered = (params[:, 1] >= 1) | (params[:, 2] < 1) | (params[:, 3] > 0)
    return bool((random & filtered).any())


def _keep_mask(scaled: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Whether each token passes top-k, top-p and min-p: bool [samples, V]."""
    top_k, top_p, min_p = params[:, 1:4].unsqueeze(-1).unbind(1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    mass = ordered.exp_()
    keep = (rank < top_k) | (top_k < 1)
    cumulative = mass.masked_fill(~keep, 0.0).cumsum(-1)
    before = cumulative.roll(1, -1)
    before[:, 0] = 0.0
    keep = keep & ((before < top_p * cumulative[:, -1:]) | (top_p >= 1))
    keep = keep & (mass >= min_p)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _sample_tokens(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample from unnormalized probabilities by the inverse CDF: [samples]."""
    cumulative = mass.cumsum(-1)
    below = cumulative <= uniform.unsqueeze(1) * cumulative[:, -1:]
    sampled: torch.Tensor = below.sum(-1).clamp(max=mass.shape[-1] - 1)
    return sampled


def score(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    top = _sort_keys(logits).topk(min(TOP, logits.shape[-1]), -1).indices
    ids = tokens.clamp(min=0).long()
    chosen = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return Scores(chosen=chosen, ids=top.int(), values=logprobs.gather(-1, top))


def _sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Unique integers in the order of logits, ties by descending id.

    The order of equal values in ``topk`` is undefined, and a stable sort is far slower.
    """
    # Adding 0 turns -0.0 into 0.0.
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
    Kernel("score", "eager", score, invariant=True),
)
