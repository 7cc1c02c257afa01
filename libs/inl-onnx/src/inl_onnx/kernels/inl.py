"""INL dynamics and per-slot state. Dynamics are computed in float32."""

from __future__ import annotations

from inl.spec.step import Step
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel


def inl_dynamics(
    x: Value, v: Value, mu: Value, alpha: Value, beta: Value, gate: Value, *, dt: float
) -> tuple[Value, Value]:
    coefficients = tuple(map(fn.upcast, (alpha, beta, gate)))
    return dynamics(x, v, mu, coefficients, dt, None, 1)


def inl_dynamics_step(
    x: Value,
    v: Value,
    mu: Value,
    controller: Value,
    *,
    dt: float,
    most_beta: float | None = None,
    limit: float | None = None,
) -> tuple[Value, Value]:
    return dynamics(x, v, mu, split(controller, most_beta), dt, limit, 1)


def inl_dynamics_n_steps(
    x: Value,
    v: Value,
    mu: Value,
    controller: Value,
    *,
    n_steps: int,
    dt: float,
    most_beta: float | None = None,
    limit: float | None = None,
) -> tuple[Value, Value]:
    return dynamics(x, v, mu, split(controller, most_beta), dt, limit, n_steps)


def split(controller: Value, most_beta: float | None) -> tuple[Value, Value, Value]:
    """Return alpha, beta and gate of a controller's output."""
    alpha, beta, gate = fn.split(fn.upcast(controller), 3)
    beta = fn.softplus(beta)
    if most_beta is not None:
        beta = fn.minimum(beta, most_beta)
    return fn.sigmoid(alpha), beta, fn.sigmoid(gate)


def dynamics(
    x: Value,
    v: Value,
    mu: Value,
    coefficients: tuple[Value, ...],
    dt: float,
    limit: float | None,
    n_steps: int,
) -> tuple[Value, Value]:
    """``n_steps`` steps with constant coefficients."""
    alpha, beta, gate = coefficients
    dtypes = x.dtype, v.dtype
    x, v, mu = map(fn.upcast, (x, v, mu))
    shape = x.shape
    for _ in range(n_steps):
        v = alpha * v - beta * (x - mu)
        if limit is not None:
            v = fn.clip(v, -limit, limit)
        x = x + gate * v * dt
    v = fn.broadcast_to(v, shape)
    return x.astype(dtypes[0]), v.astype(dtypes[1])


def read_slots(table: Value, step: Step) -> Value:
    index = fn.arange(step.tokens, step.tokens.shape[0])
    continues = (index < step.used_counts[2]) & (step.rows < step.used_counts[0])
    continues = continues.reshape(-1, *(1,) * (table.ndim - 1))
    return fn.where(continues, fn.take(table, fn.take(step.slots, step.rows)), 0)


def write_slots(x: Value, table: Value, step: Step) -> Value:
    used = fn.arange(step.slots, step.slots.shape[0]) < step.used_counts[1]
    used = used.reshape(-1, *(1,) * (table.ndim - 1))
    last = fn.clip(step.starts[1:] - 1, 0, x.shape[0] - 1)
    return fn.put(table, [step.slots], fn.where(used, fn.take(x, last), 0))


KERNELS = (
    kernel(inl_dynamics),
    kernel(inl_dynamics_step),
    kernel(inl_dynamics_n_steps),
    kernel(read_slots),
    kernel(write_slots),
)
