"""INL dynamics and the blocks that models build of them."""

from __future__ import annotations

import torch
from torch.nn import functional

from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product

Pair = tuple[torch.Tensor, torch.Tensor]


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Convert float16 and bfloat16 to float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def inl_dynamics(
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    *,
    dt: float,
) -> Pair:
    dtypes = x.dtype, v.dtype
    x, v, mu, alpha, beta, gate = map(upcast, (x, v, mu, alpha, beta, gate))
    new_v = (x - mu).mul_(beta).neg_().addcmul_(alpha, v)
    new_x = torch.addcmul(x, gate, new_v, value=dt)
    return new_x.to(dtypes[0]), new_v.to(dtypes[1])


def coefficients(
    controller: torch.Tensor, most_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split and activate a controller's output [..., 3 * D]: alpha, beta and gate."""
    alpha, beta, gate = upcast(controller).chunk(3, -1)
    # Above the threshold torch's softplus is the identity.
    beta = functional.softplus(beta, threshold=40.0)
    if most_beta is not None:
        beta = beta.clamp(max=most_beta)
    return alpha.sigmoid(), beta, gate.sigmoid()


def inl_dynamics_n_steps(
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    controller: torch.Tensor,
    *,
    n_steps: int,
    dt: float,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    dtypes = x.dtype, v.dtype
    alpha, beta, gate = coefficients(controller, most_beta)
    x, v, mu = upcast(x), upcast(v).expand(x.shape), upcast(mu)
    for _ in range(n_steps):
        v = (x - mu).mul_(beta).neg_().addcmul_(alpha, v)
        if limit is not None:
            v.clamp_(-limit, limit)
        x = torch.addcmul(x, gate, v, value=dt)
    return x.to(dtypes[0]), v.to(dtypes[1])


def inl_dynamics_step(
    x: torch.Tensor,
    v: torch.Tensor,
    mu: torch.Tensor,
    controller: torch.Tensor,
    *,
    dt: float,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    return inl_dynamics_n_steps(
        x, v, mu, controller, n_steps=1, dt=dt, most_beta=most_beta, limit=limit
    )


def inl_block(
    h: torch.Tensor, velocity: torch.Tensor, w: InlBlock, *, dt: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inner = product(torch.cat([h, velocity], -1), w.inner, w.inner_bias)
    inner = functional.silu(inner, inplace=True)
    controller = product(inner, w.outer, w.outer_bias)
    context = w.context
    mu = product(h, context, w.mu) if context is not None else w.mu.expand_as(h).clone()
    h, velocity = inl_dynamics_step(
        h, velocity, mu, controller, dt=dt, most_beta=MOST_BETA, limit=LIMIT
    )
    return h, velocity, mu


def silu(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x)


def clip(x: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    return x.clamp(low, high)


KERNELS = (
    Kernel("inl_dynamics", "eager", inl_dynamics),
    Kernel("inl_dynamics_step", "eager", inl_dynamics_step),
    Kernel("inl_dynamics_n_steps", "eager", inl_dynamics_n_steps),
    Kernel("inl_block", "eager", inl_block),
    Kernel("silu", "eager", silu),
    Kernel("clip", "eager", clip, invariant=True),
)
