"""All rows of the table."""

from __future__ import annotations

from kernels import dynamics_rows, expert_rows, packed_rows, rows, step_rows

ROWS: tuple[rows.Row, ...] = (
    *rows.ROWS, *step_rows.ROWS, *packed_rows.ROWS, *expert_rows.ROWS,
    *dynamics_rows.ROWS,
)  # fmt: skip
