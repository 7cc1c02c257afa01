"""Llama in plain torch, without INL: the reference of ``cuda_serve.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate ``x`` [T, heads, d] of a sequence that starts at position 0."""
    tokens, _, dim = x.shape
    rates = theta ** (-torch.arange(0, dim, 2, device=x.device).double() / dim)
    angle = torch.arange(tokens, device=x.device).double()[:, None] * rates
    cos, sin = (f(angle).float()[:, None] for f in (torch.cos, torch.sin))
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def logits(c: Any, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Logits [V] after the last of ``ids`` [T].

    c: a :class:`~inl.models.llama.LlamaConfig`. w: tensors by their Hugging Face names,
    in the compute dtype.
    """
    x = w["model.embed_tokens.weight"][ids]
    for index in range(c.layers):

        def part(name: str, index: int = index) -> torch.Tensor:
            return w[f"model.layers.{index}.{name}.weight"]

        y = norm(x, part("input_layernorm"), c.norm_eps)
        q, k, v = (
            (y @ part(f"self_attn.{name}_proj").T).view(len(ids), -1, c.head_dim)
            for name in "qkv"
        )
        q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        y = attend(q, k, v).transpose(0, 1).reshape(len(ids), -1)
        x = x + y @ part("self_attn.o_proj").T
        y = norm(x, part("post_attention_layernorm"), c.norm_eps)
        gate = functional.silu((y @ part("mlp.gate_proj").T).float()).to(y.dtype)
        x = x + (gate * (y @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
    last = norm(x[-1:], w["model.norm.weight"], c.norm_eps)
    head = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
    return (last @ w[head].T)[0]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [heads, T, d], one head at a time, scores in float32."""
    tokens, dim = q.shape[1:]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    found = []
    for one, key, value in zip(q, k, v, strict=True):
        scores = (one.float() @ key.float().T) * dim**-0.5
        mass = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        found.append((mass @ value.float()).to(q.dtype))
    return torch.stack(found)
