"""Programs of INL dynamics, forward and backward: see :mod:`inl.ops.inl_functions`.

Operands lie at three strides, over [outer, inner, width], so that nothing broadcast is
ever written out. All arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

FULL = tl.constexpr(1)
"""A gradient as large as the position."""

SUMMED = tl.constexpr(2)
"""A gradient that is a row, summed over a program's rows."""


@triton.jit
def sigmoid(x: tensor) -> tensor:
    """As :func:`inl.ops.inl.sigmoid`: exact far below 0."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def softplus(x: tensor) -> tensor:
    """``log(1 + exp(x))``, with the digits that adding to 1 loses."""
    small = tl.exp(-tl.abs(x))
    one = 1 + small
    lost = one - 1
    exact = tl.log(one) * (small / tl.where(lost == 0, 1, lost))
    return tl.maximum(x, 0) + tl.where(lost == 0, small, exact)


@triton.jit
def bounded(v: tensor, limit: tensor, LIMITED: tl.constexpr) -> tensor:
    """``v`` within ``limit`` of 0, and NaN where it is."""
    if LIMITED:
        v = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v))
    return v


@triton.jit
def coefficients(
    alpha: tensor, beta: tensor, gate: tensor, most_beta: tensor,
    ACTIVATED: tl.constexpr, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Alpha, beta and gate, of a controller's output where it is that."""
    if ACTIVATED:
        alpha, beta, gate = sigmoid(alpha), softplus(beta), sigmoid(gate)
        if CAPPED:
            beta = tl.where(beta > most_beta, most_beta, beta)
    return alpha, beta, gate


@triton.jit
def lay(
    p: tensor, outer: tensor, inner: tensor, at: tensor, first: tensor, second: tensor,
    third: tensor, mask: tensor,
) -> tensor:  # fmt: skip
    """Part of an operand's row, in float32."""
    place = p + outer * first + inner * second + at * third
    return tl.load(place, mask=mask, other=0).to(tl.float32)


@triton.jit
def forward(
    x: tensor, v: tensor, mu: tensor, alpha: tensor, beta: tensor, gate: tensor,
    dt: tensor, moved: tensor, new: tensor,
    v0: tensor, v1: tensor, v2: tensor, m0: tensor, m1: tensor, m2: tensor,
    a0: tensor, a1: tensor, a2: tensor, b0: tensor, b1: tensor, b2: tensor,
    g0: tensor, g1: tensor, g2: tensor, t0: tensor, t1: tensor, t2: tensor,
    size: tensor, width: tensor, steps: tensor, most_beta: tensor, limit: tensor,
    NUMBER: tl.constexpr, ACTIVATED: tl.constexpr, CAPPED: tl.constexpr,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Advance part of a row by ``steps``. NUMBER: dt is one, rather than a tensor."""
    row = tl.program_id(0)
    i, j = (row // size).to(tl.int64), (row % size).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    place = row.to(tl.int64) * width + at
    p = tl.load(x + place, mask=mask, other=0).to(tl.float32)
    q = lay(v, i, j, at, v0, v1, v2, mask)
    m = lay(mu, i, j, at, m0, m1, m2, mask)
    a = lay(alpha, i, j, at, a0, a1, a2, mask)
    b = lay(beta, i, j, at, b0, b1, b2, mask)
    g = lay(gate, i, j, at, g0, g1, g2, mask)
    a, b, g = coefficients(a, b, g, most_beta, ACTIVATED, CAPPED)
    if NUMBER:
        g *= dt
    else:
        g *= lay(dt, i, j, at, t0, t1, t2, mask)
    for _ in range(steps):
        q = bounded(a * q - b * (p - m), limit, LIMITED)
        p += g * q
    tl.store(moved + place, p, mask=mask)
    tl.store(new + place, q, mask=mask)


@triton.jit
def put(
    p: tensor, place: tensor, value: tensor, mask: tensor, HOW: tl.constexpr,
) -> None:  # fmt: skip
    """Store a gradient that is as large as the position."""
    if HOW == FULL:
        tl.store(p + place, value, mask=mask)


@triton.jit
def put_sum(
    p: tensor, place: tensor, value: tensor, mask: tensor, HOW: tl.constexpr,
) -> None:  # fmt: skip
    """Store a gradient that was summed over a program's rows."""
    if HOW == SUMMED:
        tl.store(p + place, value, mask=mask)


@triton.jit
def backward(
    gx: tensor, gv: tensor, x: tensor, v: tensor, mu: tensor, alpha: tensor,
    beta: tensor, gate: tensor, dt: tensor, d_x: tensor, d_v: tensor, d_mu: tensor,
    d_alpha: tensor, d_beta: tensor, d_gate: tensor, d_dt: tensor,
    v0: tensor, v1: tensor, v2: tensor, m0: tensor, m1: tensor, m2: tensor,
    a0: tensor, a1: tensor, a2: tensor, b0: tensor, b1: tensor, b2: tensor,
    g0: tensor, g1: tensor, g2: tensor, t0: tensor, t1: tensor, t2: tensor,
    rows: tensor, size: tensor, width: tensor, chunk: tensor, pitch: tensor,
    steps: tensor, most_beta: tensor, limit: tensor, NUMBER: tl.constexpr,
    ACTIVATED: tl.constexpr, CAPPED: tl.constexpr, LIMITED: tl.constexpr,
    X: tl.constexpr, V: tl.constexpr, MU: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, GATE: tl.constexpr, DT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of ``chunk`` rows; what came before each step is computed again.

    pitch: from one row to the next of the gradients of alpha, beta and gate. Of each
    operand, a constant says how its gradient is stored, 0 for not at all.
    """
    part = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    all_mu = tl.zeros((BLOCK,), tl.float32)
    all_alpha = tl.zeros((BLOCK,), tl.float32)
    all_beta = tl.zeros((BLOCK,), tl.float32)
    all_gate = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * chunk, tl.minimum((part + 1) * chunk, rows)):
        i, j = (row // size).to(tl.int64), (row % size).to(tl.int64)
        place = tl.cast(row, tl.int64) * width + at
        x_0 = tl.load(x + place, mask=mask, other=0).to(tl.float32)
        v_0 = lay(v, i, j, at, v0, v1, v2, mask)
        m = lay(mu, i, j, at, m0, m1, m2, mask)
        raw_a = lay(alpha, i, j, at, a0, a1, a2, mask)
        raw_b = lay(beta, i, j, at, b0, b1, b2, mask)
        raw_g = lay(gate, i, j, at, g0, g1, g2, mask)
        a, b, g = coefficients(raw_a, raw_b, raw_g, most_beta, ACTIVATED, CAPPED)
        if NUMBER:
            t = tl.zeros((BLOCK,), tl.float32) + dt
        else:
            t = lay(dt, i, j, at, t0, t1, t2, mask)
        d_p = tl.load(gx + place, mask=mask, other=0).to(tl.float32)
        d_q = tl.load(gv + place, mask=mask, other=0).to(tl.float32)
        s_m = tl.zeros((BLOCK,), tl.float32)
        s_a = tl.zeros((BLOCK,), tl.float32)
        s_b = tl.zeros((BLOCK,), tl.float32)
        s_g = tl.zeros((BLOCK,), tl.float32)
        s_t = tl.zeros((BLOCK,), tl.float32)
        for done in range(steps):
            p, q = x_0, v_0
            for _ in range(steps - 1 - done):
                q = bounded(a * q - b * (p - m), limit, LIMITED)
                p += t * g * q
            free = a * q - b * (p - m)
            moving = bounded(free, limit, LIMITED) * d_p
            s = d_q + t * g * d_p
            if LIMITED:
                s = tl.where(tl.abs(free) <= limit, s, 0)
            s_t += g * moving
            s_g += t * moving
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
        put(d_x, place, d_p, mask, X)
        put(d_v, place, d_q, mask, V)
        put(d_mu, place, s_m, mask, MU)
        put(d_dt, place, s_t, mask, DT)
        put(d_alpha, tl.cast(row, tl.int64) * pitch + at, s_a, mask, ALPHA)
        put(d_beta, tl.cast(row, tl.int64) * pitch + at, s_b, mask, BETA)
        put(d_gate, tl.cast(row, tl.int64) * pitch + at, s_g, mask, GATE)
        all_mu += s_m
        all_alpha += s_a
        all_beta += s_b
        all_gate += s_g
    put_sum(d_mu, part * width + at, all_mu, mask, MU)
    put_sum(d_alpha, part * pitch + at, all_alpha, mask, ALPHA)
    put_sum(d_beta, part * pitch + at, all_beta, mask, BETA)
    put_sum(d_gate, part * pitch + at, all_gate, mask, GATE)


@triton.jit
def control(
    h: tensor, velocity: tensor, weight: tensor, bias: tensor, y: tensor,
    h_stride: tensor, v_stride: tensor, H: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One number of a controller's inner layer, over positions, then velocities."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, H, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        mask = at < H
        b = tl.load(weight + row * 2 * H + at, mask=mask, other=0).to(tl.float32)
        c = tl.load(weight + (row * 2 + 1) * H + at, mask=mask, other=0).to(tl.float32)
        x = tl.load(h + token * h_stride + at, mask=mask, other=0).to(tl.float32)
        v = tl.load(velocity + token * v_stride + at, mask=mask, other=0)
        sums += b * x + c * v.to(tl.float32)
    found = tl.sum(sums, 0) + tl.load(bias + row).to(tl.float32)
    tl.store(y + token * tl.num_programs(0) + row, found * sigmoid(found))


@triton.jit
def third(
    inner: tensor, outer: tensor, bias: tensor, rows: tensor, lane: tensor,
    mask: tensor, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Numbers ``rows`` of a controller's output."""
    cells = outer + rows[:, None] * K + lane[None, :]
    b = tl.load(cells, mask=mask[:, None] & (lane < K)[None, :], other=0)
    found = tl.sum(b.to(tl.float32) * inner[None, :], 1)
    return found + tl.load(bias + rows, mask=mask, other=0).to(tl.float32)


@triton.jit
def block_step(
    h: tensor, velocity: tensor, inner: tensor, mu: tensor, outer: tensor, bias: tensor,
    context: tensor, moved: tensor, new: tensor, drawn: tensor, h_stride: tensor,
    v_stride: tensor, dt: tensor, most_beta: tensor, limit: tensor, H: tl.constexpr,
    K: tl.constexpr, CONTEXT: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Some of a token's positions: controller, moving mu, clamps and step in one."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    mask = rows < H
    m = tl.load(mu + rows, mask=mask, other=0).to(tl.float32)
    if CONTEXT:
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, H, COLUMNS):
            at = start + tl.arange(0, COLUMNS)
            both = mask[:, None] & (at < H)[None, :]
            b = tl.load(context + rows[:, None] * H + at[None, :], mask=both, other=0)
            x = tl.load(h + token * h_stride + at, mask=at < H, other=0)
            sums += b.to(tl.float32) * x.to(tl.float32)[None, :]
        m += tl.sum(sums, 1)
    lane = tl.arange(0, LANES)
    held = tl.load(inner + token * K + lane, mask=lane < K, other=0)
    a = third(held, outer, bias, rows, lane, mask, K)
    b = third(held, outer + H * K, bias + H, rows, lane, mask, K)
    g = third(held, outer + 2 * H * K, bias + 2 * H, rows, lane, mask, K)
    a, b, g = coefficients(a, b, g, most_beta, True, True)
    p = tl.load(h + token * h_stride + rows, mask=mask, other=0).to(tl.float32)
    q = tl.load(velocity + token * v_stride + rows, mask=mask, other=0).to(tl.float32)
    q = bounded(a * q - b * (p - m), limit, True)
    tl.store(moved + token * H + rows, p + dt * g * q, mask=mask)
    tl.store(new + token * H + rows, q, mask=mask)
    tl.store(drawn + token * H + rows, m, mask=mask)
