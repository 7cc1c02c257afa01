"""Rows of INL dynamics: steps, gradients, and a model's layer."""

# ruff: noqa: ARG005 - every way takes all of a row's inputs

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl_torch import functional as trained
from kernels.rows import Row, x

DT = 0.1
CLAMPS = {"dt": DT, "most_beta": MOST_BETA, "limit": LIMIT}


def stepped(
    at: Any, v: Any, mu: Any, controller: Any, steps: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some steps with clamps in float32, in plain torch."""
    kept = at.dtype, v.dtype
    alpha, beta, gate = controller.float().chunk(3, -1)
    alpha, gate = alpha.sigmoid(), gate.sigmoid()
    beta = F.softplus(beta, threshold=40.0).clamp(max=MOST_BETA)
    at, v, mu = at.float(), v.float(), mu.float()
    for _ in range(steps):
        v = (alpha * v - beta * (at - mu)).clamp(-LIMIT, LIMIT)
        at = at + DT * gate * v
    return at.to(kept[0]), v.to(kept[1])


def operands(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Positions, velocities, mu and the controller's output."""
    width = shape[-1]
    return x(*shape), x(*shape), x(width), x(*shape[:-1], 3 * width)


def said(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def step(*shape: int) -> Row:
    return Row(
        "inl_dynamics_step", said(shape), lambda: operands(shape),
        lambda run, *args: run(*args, **CLAMPS), stepped,
        outputs=4 * torch.Size(shape).numel(),
    )  # fmt: skip


def several(steps: int, *shape: int) -> Row:
    return Row(
        "inl_dynamics_n_steps", f"{steps} steps, {said(shape)}",
        lambda: operands(shape),
        lambda run, *args: run(*args, n_steps=steps, **CLAMPS),
        lambda *args: stepped(*args, steps), outputs=4 * torch.Size(shape).numel(),
    )  # fmt: skip


def both(*shape: int) -> Row:
    """A step and all its gradients; that of mu is a sum over all rows."""
    size, width = torch.Size(shape).numel(), shape[-1]

    def make() -> tuple[torch.Tensor, ...]:
        return (*operands(shape), x(*shape), x(*shape))

    def gradients(way: Any) -> Any:
        def run(*args: torch.Tensor) -> Any:
            with torch.inference_mode(mode=False), torch.enable_grad():
                given = (a.clone() if a.is_inference() else a for a in args)
                *leaves, dx, dv = (a.detach() for a in given)
                for leaf in leaves:
                    leaf.requires_grad_()
                return torch.autograd.grad(way(*leaves), leaves, (dx, dv))

        return run

    # Forward reads 5 and writes 2; backward reads 7 and writes 5.
    return Row(
        "inl_dynamics_step", f"and backward, {said(shape)}", make,
        lambda run, *args: gradients(
            lambda *given: trained.inl_dynamics_step(*given, **CLAMPS)
        )(*args),
        gradients(stepped), read=2 * 12 * size + 6 * width, outputs=2 * 7 * size,
    )  # fmt: skip


def block(tokens: int, hidden: int, lanes: int) -> Row:
    """A layer: controller of two products, a step, and contextual mu."""
    shapes = ((hidden,), (lanes, 2 * hidden), (lanes,), (3 * hidden, lanes),
              (3 * hidden,), (hidden, hidden))  # fmt: skip

    def make() -> tuple[Any, ...]:
        w = InlBlock(*(x(*shape, scale=shape[-1] ** -0.5) for shape in shapes))
        return x(tokens, hidden), x(tokens, hidden), w

    def plain(h: Any, v: Any, w: InlBlock) -> Any:
        inner = F.silu(F.linear(torch.cat((h, v), -1), w.inner, w.inner_bias))
        mu = F.linear(h, w.context, w.mu)
        controller = F.linear(inner, w.outer, w.outer_bias)
        return *stepped(h, v, mu, controller), mu

    return Row(
        "inl_block", f"{tokens} rows, {hidden}", make,
        lambda run, *args: run(*args, dt=DT), plain,
        lambda h, v, w: F.linear(h, w.context),
        flops=2 * tokens * hidden * (5 * lanes + hidden),
        outputs=6 * tokens * hidden,
    )  # fmt: skip


ROWS = (
    step(1, 1, 4096), step(64, 1, 4096), step(8, 2048, 4096),
    several(3, 8, 2048, 4096), both(8, 2048, 4096),
    *(block(tokens, 4096, 64) for tokens in (1, 64, 2048)),
)  # fmt: skip
