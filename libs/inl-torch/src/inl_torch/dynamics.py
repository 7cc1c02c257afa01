"""Trainable layer of INL dynamics."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from inl.ops.inl import InlBlock
from inl_torch.functional import inl_block


@final
class InlDynamics(nn.Module):
    """INL dynamics with a learnable equilibrium and controller.

    Advances ``h`` and its velocity [..., hidden] by one step. The names of its state
    dict are those of ``layers.N.dynamics`` in a checkpoint. controller: width of the
    controller's inner layer. context: whether mu depends on ``h``.
    """

    def __init__(
        self,
        hidden: int,
        *,
        controller: int = 64,
        dt: float = 0.1,
        context: bool = True,
    ) -> None:
        super().__init__()
        self.dt = dt
        self.mu = nn.Parameter(torch.zeros(hidden))
        self.controller_in = nn.Linear(2 * hidden, controller)
        self.controller_out = nn.Linear(controller, 3 * hidden)
        self.mu_proj = nn.Linear(hidden, hidden, bias=False) if context else None

    def forward(
        self, h: torch.Tensor, velocity: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the new position, velocity (which begins at 0 by default) and mu."""
        if velocity is None:
            velocity = torch.zeros_like(h)
        w = InlBlock(
            mu=self.mu,
            inner=self.controller_in.weight,
            inner_bias=self.controller_in.bias,
            outer=self.controller_out.weight,
            outer_bias=self.controller_out.bias,
            context=None if self.mu_proj is None else self.mu_proj.weight,
        )
        return inl_block(h, velocity, w, dt=self.dt)
