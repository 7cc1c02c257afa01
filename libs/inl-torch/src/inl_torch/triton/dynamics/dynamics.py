"""INL dynamics in one launch, and the INL block in two launches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inl.ops.inl import LIMIT, MOST_BETA, InlBlock
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import product
from inl_torch.triton.common import PREFERENCE, dense, power, refuse_dtype, spread
from inl_torch.triton.dynamics.kernels import block_step, controller_inner, forward
from inl_torch.triton.matmul.products import MIXED

Pair = tuple[torch.Tensor, torch.Tensor]

BLOCK = 1024
"""Elements of a row per program."""

MAX_FUSED_ROWS = 2
"""Most rows for which a block is two launches, which read the weights for each row."""

MAX_CONTROLLER = 1024
"""Largest inner layer of a controller that fits one program."""


class Shape3d(NamedTuple):
    """A shape folded to [outer, inner, width], for operands with three strides."""

    outer: int
    inner: int
    width: int

    @classmethod
    def of(cls, shape: torch.Size) -> Shape3d:
        """Fold a shape: its first axis, all axes between, and its last."""
        if len(shape) < 2:
            return cls(1, 1, shape[0] if shape else 1)
        return cls(shape[0], math.prod(shape[1:-1]), shape[-1])

    @property
    def rows(self) -> int:
        """Number of rows of ``width`` elements."""
        return self.outer * self.inner

    def broadcast(self, operand: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """View an operand that broadcasts to ``shape`` over the three axes."""
        return operand.expand(shape).reshape(tuple(self))


class Options(NamedTuple):
    """Parameters that are the same for every element."""

    n_steps: int = 1
    activated: bool = False
    """Whether alpha, beta and gate are a controller's output, to be activated."""
    most_beta: float | None = None
    limit: float | None = None

    def kernel_args(self) -> dict[str, Any]:
        """Return the arguments of the forward and backward kernels."""
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
    """Return new positions and velocities, of the dtypes of ``x`` and of
    ``operands[0]``.

    operands: v, mu, alpha, beta, gate, each of which broadcasts to ``x`` [..., D].
    """
    x, shape3d = x.contiguous(), Shape3d.of(x.shape)
    new_x = torch.empty_like(x)
    new_v = torch.empty(x.shape, dtype=operands[0].dtype, device=x.device)
    tensors, strides = broadcast_operands(x, operands, dt, shape3d)
    block = min(power(shape3d.width), BLOCK)
    if shape3d.rows:
        forward[(shape3d.rows, -(-shape3d.width // block))](
            x, *tensors, new_x, new_v, *strides, size=shape3d.inner,
            width=shape3d.width, SCALAR_DT=not isinstance(dt, torch.Tensor),
            BLOCK=block, num_warps=spread(4, x), **options.kernel_args(),
        )  # fmt: skip
    return new_x, new_v


def broadcast_operands(
    x: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    dt: torch.Tensor | float,
    shape3d: Shape3d,
) -> tuple[list[Any], list[int]]:
    """Broadcast the operands and dt; return them, and three strides of each."""
    views: list[Any] = [shape3d.broadcast(operand, x.shape) for operand in operands]
    strides = [stride for view in views for stride in view.stride()]
    if isinstance(dt, torch.Tensor):
        views.append(shape3d.broadcast(dt, x.shape))
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


def wide_block(
    h: torch.Tensor, velocity: torch.Tensor, w: InlBlock, *, dt: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block of many rows, whose products are the library's."""
    if h.shape[0] <= MAX_FUSED_ROWS:
        # Exact sizes share the kernel of their class.
        return inl_block(h, velocity, w, dt=dt)
    inner = product(torch.cat([h, velocity], -1), w.inner, w.inner_bias)
    controller = product(functional.silu(inner), w.outer, w.outer_bias)
    mu = w.mu.expand_as(h).clone()
    if w.context is not None:
        mu = product(h, w.context, w.mu)
    h, velocity = inl_dynamics_step(
        h, velocity, mu, controller, dt=dt, most_beta=MOST_BETA, limit=LIMIT
    )
    return h, velocity, mu


def inl_block(
    h: torch.Tensor, velocity: torch.Tensor, w: InlBlock, *, dt: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h, velocity = dense(h), dense(velocity)
    (tokens, width), inner_width = h.shape, w.inner.shape[0]
    inner = torch.empty((tokens, inner_width), dtype=torch.float32, device=h.device)
    new_x, new_v, mu = (torch.empty_like(h) for _ in range(3))
    strides, columns = (h.stride(0), velocity.stride(0)), min(power(width), 1024)
    controller_inner[(inner_width, tokens)](
        h, velocity, w.inner, w.inner_bias, inner, *strides, H=width, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    rows = 2 if width <= 2048 else 4
    block_step[(-(-width // rows), tokens)](
        h, velocity, inner, w.mu, w.outer, w.outer_bias,
        w.mu if w.context is None else w.context, new_x, new_v, mu, *strides, dt,
        MOST_BETA, LIMIT, H=width, K=inner_width, CONTEXT=w.context is not None,
        INNER_P=power(inner_width), ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return new_x, new_v, mu


def _refuse(x: Any, *_: Any, **__: Any) -> str | None:
    return refuse_dtype(x)


def _refuse_block(h: Any, _velocity: Any, w: Any, **_: Any) -> str | None:
    if w.inner.shape[0] > MAX_CONTROLLER:
        return f"controllers of {w.inner.shape[0]}, takes {MAX_CONTROLLER} at most"
    return refuse_dtype(h)


def _refuse_many(h: Any, *rest: Any, **_: Any) -> str | None:
    if h.shape[0] > MAX_FUSED_ROWS:
        return f"takes {MAX_FUSED_ROWS} rows at most, found {h.shape[0]}"
    return _refuse_block(h, *rest)


def _refuse_few(h: Any, *rest: Any, **_: Any) -> str | None:
    if h.shape[0] <= MAX_FUSED_ROWS:
        return f"takes more than {MAX_FUSED_ROWS} rows, found {h.shape[0]}"
    return _refuse_block(h, *rest)


KERNELS = tuple(
    Kernel(op, name, run, refuse=refuse, preference=PREFERENCE)
    for op, name, run, refuse in (
        ("inl_dynamics", "triton", inl_dynamics, _refuse),
        ("inl_dynamics_step", "triton", inl_dynamics_step, _refuse),
        ("inl_dynamics_n_steps", "triton", inl_dynamics_n_steps, _refuse),
        ("inl_block", "triton", inl_block, _refuse_many),
        ("inl_block", MIXED, wide_block, _refuse_few),
    )
)
