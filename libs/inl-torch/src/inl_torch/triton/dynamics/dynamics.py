"""INL dynamics in one launch, and a model's layer of them in two."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype
from inl_torch.triton.dynamics.kernels import block_step, control, forward

Pair = tuple[torch.Tensor, torch.Tensor]

BLOCK = 1024
"""Numbers of a row that a program takes at once."""

FEW = 2
"""Rows up to which a model's layer is two launches that read its weights for each."""

WIDEST_CONTROLLER = 1024
"""Widest inner layer of a controller that one program holds."""


class Laid(NamedTuple):
    """Positions as [outer, inner, width], and operands at strides over that."""

    outer: int
    inner: int
    width: int

    @classmethod
    def of(cls, shape: torch.Size) -> Laid:
        """The first axis, the last, and all between them."""
        if len(shape) < 2:
            return cls(1, 1, shape[0] if shape else 1)
        return cls(shape[0], math.prod(shape[1:-1]), shape[-1])

    @property
    def rows(self) -> int:
        """Rows of ``width`` numbers."""
        return self.outer * self.inner

    def place(self, operand: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """An operand that broadcasts to ``shape``, over the three axes; a view."""
        return operand.expand(shape).reshape(tuple(self))


class Options(NamedTuple):
    """What is the same for every number."""

    n_steps: int = 1
    activated: bool = False
    """Whether alpha, beta and gate are a controller's output yet."""
    most_beta: float | None = None
    limit: float | None = None

    def facts(self) -> dict[str, Any]:
        """Arguments of both programs."""
        return {
            "steps": self.n_steps,
            "most_beta": self.most_beta or 0.0,
            "limit": self.limit or 0.0,
            "ACTIVATED": self.activated,
            "CAPPED": self.most_beta is not None,
            "LIMITED": self.limit is not None,
        }


def advance(
    x: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    dt: torch.Tensor | float,
    options: Options,
) -> Pair:
    """New positions and velocities, of the dtypes of ``x`` and of the first operand.

    operands: v, mu, alpha, beta, gate, each of which broadcasts to ``x`` [..., D].
    """
    x, laid = x.contiguous(), Laid.of(x.shape)
    moved = torch.empty_like(x)
    new = torch.empty(x.shape, dtype=operands[0].dtype, device=x.device)
    tensors, strides = placed(x, operands, dt, laid)
    block = min(power(laid.width), BLOCK)
    if laid.rows:
        forward[(laid.rows, -(-laid.width // block))](
            x, *tensors, moved, new, *strides, size=laid.inner, width=laid.width,
            NUMBER=not isinstance(dt, torch.Tensor), BLOCK=block,
            num_warps=4, **options.facts(),
        )  # fmt: skip
    return moved, new


def placed(
    x: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    dt: torch.Tensor | float,
    laid: Laid,
) -> tuple[list[Any], list[int]]:
    """The operands and dt, and three strides of each."""
    views: list[Any] = [laid.place(operand, x.shape) for operand in operands]
    strides = [stride for view in views for stride in view.stride()]
    if isinstance(dt, torch.Tensor):
        views.append(laid.place(dt, x.shape))
        return views, [*strides, *views[-1].stride()]
    return [*views, float(dt)], [*strides, 0, 0, 0]


def inl_dynamics(
    x: torch.Tensor, v: torch.Tensor, mu: torch.Tensor, alpha: torch.Tensor,
    beta: torch.Tensor, gate: torch.Tensor, *, dt: float,
) -> Pair:  # fmt: skip
    return advance(x, (v, mu, alpha, beta, gate), dt, Options())


def inl_dynamics_n_steps(
    x: torch.Tensor, v: torch.Tensor, mu: torch.Tensor, controller: torch.Tensor, *,
    n_steps: int, dt: float, most_beta: float | None = None, limit: float | None = None,
) -> Pair:  # fmt: skip
    operands = (v, mu, *controller.chunk(3, -1))
    return advance(x, operands, dt, Options(n_steps, True, most_beta, limit))


def inl_dynamics_step(
    x: torch.Tensor, v: torch.Tensor, mu: torch.Tensor, controller: torch.Tensor, *,
    dt: float, most_beta: float | None = None, limit: float | None = None,
) -> Pair:  # fmt: skip
    return inl_dynamics_n_steps(
        x, v, mu, controller, n_steps=1, dt=dt, most_beta=most_beta, limit=limit
    )


def inl_block(
    h: torch.Tensor, velocity: torch.Tensor, w: InlBlock, *, dt: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if h.shape[0] <= FEW:
        return _block_of_few(dense(h), dense(velocity), w, dt)
    inner = product(torch.cat([h, velocity], -1), w.inner, w.inner_bias)
    controller = product(functional.silu(inner), w.outer, w.outer_bias)
    mu = w.mu.expand_as(h).clone()
    if w.context is not None:
        mu = product(h, w.context, w.mu)
    h, velocity = inl_dynamics_step(
        h, velocity, mu, controller, dt=dt, most_beta=MOST_BETA, limit=LIMIT
    )
    return h, velocity, mu


def _block_of_few(
    h: torch.Tensor, velocity: torch.Tensor, w: InlBlock, dt: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (tokens, width), lanes = h.shape, w.inner.shape[0]
    inner = torch.empty((tokens, lanes), dtype=torch.float32, device=h.device)
    moved, new, mu = (torch.empty_like(h) for _ in range(3))
    strides, columns = (h.stride(0), velocity.stride(0)), min(power(width), 1024)
    control[(lanes, tokens)](
        h, velocity, w.inner, w.inner_bias, inner, *strides, H=width, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    rows = 2 if width <= 2048 else 4
    block_step[(-(-width // rows), tokens)](
        h, velocity, inner, w.mu, w.outer, w.outer_bias,
        w.mu if w.context is None else w.context, moved, new, mu, *strides, dt,
        MOST_BETA, LIMIT, H=width, K=lanes, CONTEXT=w.context is not None,
        LANES=power(lanes), ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return moved, new, mu


def _refuse(x: Any, *_: Any, **__: Any) -> str | None:
    return refuse_dtype(x)


def _refuse_block(h: Any, _velocity: Any, w: Any, **_: Any) -> str | None:
    if w.inner.shape[0] > WIDEST_CONTROLLER:
        return f"controllers of {w.inner.shape[0]}, takes {WIDEST_CONTROLLER} at most"
    return refuse_dtype(h)


KERNELS = tuple(
    Kernel(op, "triton", run, refuse=refuse, preference=PREFERENCE)
    for op, run, refuse in (
        ("inl_dynamics", inl_dynamics, _refuse),
        ("inl_dynamics_step", inl_dynamics_step, _refuse),
        ("inl_dynamics_n_steps", inl_dynamics_n_steps, _refuse),
        ("inl_block", inl_block, _refuse_block),
    )
)
