"""Triton kernels of INL dynamics, forward and backward: see
:mod:`inl.ops.inl_functions`.

Operands have three strides over [outer, inner, width], so that broadcast operands are
never materialized. All arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

FULL = tl.constexpr(1)
"""Gradient with the shape of the position."""

SUMMED = tl.constexpr(2)
"""Gradient of a row, summed over the rows of a program."""


@triton.jit
def sigmoid(x: tensor) -> tensor:
    """Sigmoid like :func:`inl.ops.inl.sigmoid`: accurate for very negative ``x``."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def softplus(x: tensor) -> tensor:
    """``log(1 + exp(x))``, corrected for the rounding of the sum."""
    exp_neg = tl.exp(-tl.abs(x))
    one_plus = 1 + exp_neg
    rounded = one_plus - 1
    corrected = tl.log(one_plus) * (exp_neg / tl.where(rounded == 0, 1, rounded))
    return tl.maximum(x, 0) + tl.where(rounded == 0, exp_neg, corrected)


@triton.jit
def clamp(v: tensor, limit: tensor, LIMITED: tl.constexpr) -> tensor:
    """Clamp ``v`` to ``[-limit, limit]``; NaN stays NaN."""
    if LIMITED:
        v = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v))
    return v


@triton.jit
def coefficients(
    alpha: tensor, beta: tensor, gate: tensor, most_beta: tensor,
    ACTIVATED: tl.constexpr, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Return alpha, beta and gate, activated where they are a controller's output."""
    if ACTIVATED:
        alpha, beta, gate = sigmoid(alpha), softplus(beta), sigmoid(gate)
        if CAPPED:
            beta = tl.where(beta > most_beta, most_beta, beta)
    return alpha, beta, gate


@triton.jit
def load_operand(
    p: tensor, outer: tensor, inner: tensor, column: tensor, stride0: tensor,
    stride1: tensor, controller_output: tensor, mask: tensor,
) -> tensor:  # fmt: skip
    """Load part of a row of an operand, in float32."""
    offset = p + outer * stride0 + inner * stride1 + column * controller_output
    return tl.load(offset, mask=mask, other=0).to(tl.float32)


@triton.jit
def forward(
    x: tensor, v: tensor, mu: tensor, alpha: tensor, beta: tensor, gate: tensor,
    dt: tensor, new_x: tensor, new_v: tensor,
    v0: tensor, v1: tensor, v2: tensor, m0: tensor, m1: tensor, m2: tensor,
    a0: tensor, a1: tensor, a2: tensor, b0: tensor, b1: tensor, b2: tensor,
    g0: tensor, g1: tensor, g2: tensor, t0: tensor, t1: tensor, t2: tensor,
    size: tensor, width: tensor, steps: tensor, most_beta: tensor, limit: tensor,
    SCALAR_DT: tl.constexpr, ACTIVATED: tl.constexpr, CAPPED: tl.constexpr,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Advance part of a row by ``steps`` steps. SCALAR_DT: dt is a number, not a
    tensor.
    """
    row = tl.program_id(0)
    i, j = (row // size).to(tl.int64), (row % size).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    offset = row.to(tl.int64) * width + column
    p = tl.load(x + offset, mask=mask, other=0).to(tl.float32)
    q = load_operand(v, i, j, column, v0, v1, v2, mask)
    m = load_operand(mu, i, j, column, m0, m1, m2, mask)
    a = load_operand(alpha, i, j, column, a0, a1, a2, mask)
    b = load_operand(beta, i, j, column, b0, b1, b2, mask)
    g = load_operand(gate, i, j, column, g0, g1, g2, mask)
    a, b, g = coefficients(a, b, g, most_beta, ACTIVATED, CAPPED)
    if SCALAR_DT:
        g *= dt
    else:
        g *= load_operand(dt, i, j, column, t0, t1, t2, mask)
    for _ in range(steps):
        q = clamp(a * q - b * (p - m), limit, LIMITED)
        p += g * q
    tl.store(new_x + offset, p, mask=mask)
    tl.store(new_v + offset, q, mask=mask)


@triton.jit
def store_full(
    p: tensor, offset: tensor, value: tensor, mask: tensor, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Store a gradient with the shape of the position, if ``KIND`` is ``FULL``."""
    if KIND == FULL:
        tl.store(p + offset, value, mask=mask)


@triton.jit
def store_summed(
    p: tensor, offset: tensor, value: tensor, mask: tensor, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Store a gradient summed over a program's rows, if ``KIND`` is ``SUMMED``."""
    if KIND == SUMMED:
        tl.store(p + offset, value, mask=mask)


@triton.jit
def backward(
    gx: tensor, gv: tensor, x: tensor, v: tensor, mu: tensor, alpha: tensor,
    beta: tensor, gate: tensor, dt: tensor, d_x: tensor, d_v: tensor, d_mu: tensor,
    d_alpha: tensor, d_beta: tensor, d_gate: tensor, d_dt: tensor, v0: tensor,
    v1: tensor, v2: tensor, m0: tensor, m1: tensor, m2: tensor, a0: tensor, a1: tensor,
    a2: tensor, b0: tensor, b1: tensor, b2: tensor, g0: tensor, g1: tensor, g2: tensor,
    t0: tensor, t1: tensor, t2: tensor, rows: tensor, size: tensor, width: tensor,
    rows_per_program: tensor, row_stride: tensor, steps: tensor, most_beta: tensor,
    limit: tensor, SCALAR_DT: tl.constexpr, ACTIVATED: tl.constexpr,
    CAPPED: tl.constexpr, LIMITED: tl.constexpr, X: tl.constexpr, V: tl.constexpr,
    MU: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, GATE: tl.constexpr,
    DT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of ``rows_per_program`` rows; the state before each step is recomputed.

    row_stride: of the gradients of alpha, beta and gate. ``X`` to ``DT`` are the kind
    of each operand's gradient: ``FULL``, ``SUMMED``, or 0 for none.
    """
    group = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    all_mu = tl.zeros((BLOCK,), tl.float32)
    all_alpha = tl.zeros((BLOCK,), tl.float32)
    all_beta = tl.zeros((BLOCK,), tl.float32)
    all_gate = tl.zeros((BLOCK,), tl.float32)
    for row in range(
        group * rows_per_program, tl.minimum((group + 1) * rows_per_program, rows)
    ):
        i, j = (row // size).to(tl.int64), (row % size).to(tl.int64)
        offset = tl.cast(row, tl.int64) * width + column
        x_0 = tl.load(x + offset, mask=mask, other=0).to(tl.float32)
        v_0 = load_operand(v, i, j, column, v0, v1, v2, mask)
        m = load_operand(mu, i, j, column, m0, m1, m2, mask)
        raw_a = load_operand(alpha, i, j, column, a0, a1, a2, mask)
        raw_b = load_operand(beta, i, j, column, b0, b1, b2, mask)
        raw_g = load_operand(gate, i, j, column, g0, g1, g2, mask)
        a, b, g = coefficients(raw_a, raw_b, raw_g, most_beta, ACTIVATED, CAPPED)
        if SCALAR_DT:
            t = tl.zeros((BLOCK,), tl.float32) + dt
        else:
            t = load_operand(dt, i, j, column, t0, t1, t2, mask)
        d_p = tl.load(gx + offset, mask=mask, other=0).to(tl.float32)
        d_q = tl.load(gv + offset, mask=mask, other=0).to(tl.float32)
        s_m = tl.zeros((BLOCK,), tl.float32)
        s_a = tl.zeros((BLOCK,), tl.float32)
        s_b = tl.zeros((BLOCK,), tl.float32)
        s_g = tl.zeros((BLOCK,), tl.float32)
        s_t = tl.zeros((BLOCK,), tl.float32)
        for done in range(steps):
            p, q = x_0, v_0
            for _ in range(steps - 1 - done):
                q = clamp(a * q - b * (p - m), limit, LIMITED)
                p += t * g * q
            unclamped = a * q - b * (p - m)
            displacement = clamp(unclamped, limit, LIMITED) * d_p
            s = d_q + t * g * d_p
            if LIMITED:
                s = tl.where(tl.abs(unclamped) <= limit, s, 0)
            s_t += g * displacement
            s_g += t * displacement
            s_a += s * q
            s_b -= s * (p - m)
            s_m += b * s
            d_p -= b * s
            d_q = a * s
        if ACTIVATED:
            s_a *= a * (1 - a)
            s_g *= g * (1 - g)
            slope = sigmoid(raw_b)
            if CAPPED:
                slope = tl.where(softplus(raw_b) <= most_beta, slope, 0)
            s_b *= slope
        store_full(d_x, offset, d_p, mask, X)
        store_full(d_v, offset, d_q, mask, V)
        store_full(d_mu, offset, s_m, mask, MU)
        store_full(d_dt, offset, s_t, mask, DT)
        store_full(
            d_alpha, tl.cast(row, tl.int64) * row_stride + column, s_a, mask, ALPHA
        )
        store_full(
            d_beta, tl.cast(row, tl.int64) * row_stride + column, s_b, mask, BETA
        )
        store_full(
            d_gate, tl.cast(row, tl.int64) * row_stride + column, s_g, mask, GATE
        )
        all_mu += s_m
        all_alpha += s_a
        all_beta += s_b
        all_gate += s_g
    store_summed(d_mu, group * width + column, all_mu, mask, MU)
    store_summed(d_alpha, group * row_stride + column, all_alpha, mask, ALPHA)
    store_summed(d_beta, group * row_stride + column, all_beta, mask, BETA)
    store_summed(d_gate, group * row_stride + column, all_gate, mask, GATE)


@triton.jit
def controller_inner(
    h: tensor, velocity: tensor, weight: tensor, bias: tensor, y: tensor,
    h_stride: tensor, v_stride: tensor, H: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One element of a controller's inner layer, of positions, then velocities."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, H, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = column < H
        b = tl.load(weight + row * 2 * H + column, mask=mask, other=0).to(tl.float32)
        c = tl.load(weight + (row * 2 + 1) * H + column, mask=mask, other=0).to(
            tl.float32
        )
        x = tl.load(h + token * h_stride + column, mask=mask, other=0).to(tl.float32)
        v = tl.load(velocity + token * v_stride + column, mask=mask, other=0)
        sums += b * x + c * v.to(tl.float32)
    acc = tl.sum(sums, 0) + tl.load(bias + row).to(tl.float32)
    tl.store(y + token * tl.num_programs(0) + row, acc * sigmoid(acc))


@triton.jit
def controller_output(
    inner: tensor, outer: tensor, bias: tensor, rows: tensor, inner_index: tensor,
    mask: tensor, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Elements ``rows`` of a controller's output."""
    cells = outer + rows[:, None] * K + inner_index[None, :]
    b = tl.load(cells, mask=mask[:, None] & (inner_index < K)[None, :], other=0)
    acc = tl.sum(b.to(tl.float32) * inner[None, :], 1)
    return acc + tl.load(bias + rows, mask=mask, other=0).to(tl.float32)


@triton.jit
def block_step(
    h: tensor, velocity: tensor, inner: tensor, mu: tensor, outer: tensor, bias: tensor,
    context: tensor, new_x: tensor, new_v: tensor, new_mu: tensor, h_stride: tensor,
    v_stride: tensor, dt: tensor, most_beta: tensor, limit: tensor, H: tl.constexpr,
    K: tl.constexpr, CONTEXT: tl.constexpr, INNER_P: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Some elements of one token: controller, contextual mu, clamps and step, fused."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    mask = rows < H
    m = tl.load(mu + rows, mask=mask, other=0).to(tl.float32)
    if CONTEXT:
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, H, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            both = mask[:, None] & (column < H)[None, :]
            b = tl.load(
                context + rows[:, None] * H + column[None, :], mask=both, other=0
            )
            x = tl.load(h + token * h_stride + column, mask=column < H, other=0)
            sums += b.to(tl.float32) * x.to(tl.float32)[None, :]
        m += tl.sum(sums, 1)
    inner_index = tl.arange(0, INNER_P)
    inner_values = tl.load(
        inner + token * K + inner_index, mask=inner_index < K, other=0
    )
    a = controller_output(inner_values, outer, bias, rows, inner_index, mask, K)
    b = controller_output(
        inner_values, outer + H * K, bias + H, rows, inner_index, mask, K
    )
    g = controller_output(
        inner_values, outer + 2 * H * K, bias + 2 * H, rows, inner_index, mask, K
    )
    a, b, g = coefficients(a, b, g, most_beta, True, True)
    p = tl.load(h + token * h_stride + rows, mask=mask, other=0).to(tl.float32)
    q = tl.load(velocity + token * v_stride + rows, mask=mask, other=0).to(tl.float32)
    q = clamp(a * q - b * (p - m), limit, True)
    tl.store(new_x + token * H + rows, p + dt * g * q, mask=mask)
    tl.store(new_v + token * H + rows, q, mask=mask)
    tl.store(new_mu + token * H + rows, m, mask=mask)
