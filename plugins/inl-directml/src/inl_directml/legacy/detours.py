"""Replacements of torch operators that torch-directml computes on the CPU.

It copies their operands to the host and back without a word. The replacements consist
of operators with a kernel for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Detours(TorchFunctionMode):
    """Context in which :data:`REPLACED` takes the place of torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


def index_copy_(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    x[(slice(None),) * (dim % x.ndim) + (index,)] = source
    return x


def index_fill_(
    x: torch.Tensor, dim: int, index: torch.Tensor, value: float
) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = index.shape[0]
    return index_copy_(x, dim, index, x.new_full(shape, value))


def roll(x: torch.Tensor, shifts: int, dims: int) -> torch.Tensor:
    size = x.shape[dims]
    at = (size - shifts) % size
    return torch.cat([x.narrow(dims, at, size - at), x.narrow(dims, 0, at)], dims)


def left_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return x * 2**bits


def right_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.floor_divide(x, 2**bits)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float,
) -> torch.Tensor:
    scores = (q * scale) @ k.transpose(-1, -2)
    if is_causal:
        queries, keys = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(keys > queries[:, None], float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ v


REPLACED: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.Tensor.index_copy_: index_copy_,
    torch.Tensor.index_fill_: index_fill_,
    torch.Tensor.roll: roll,
    torch.roll: roll,
    functional.scaled_dot_product_attention: attend,
    torch.Tensor.__lshift__: left_shift,
    torch.Tensor.__rshift__: right_shift,
}
"""Function of torch -> its replacement, with the same parameters as it is used."""
