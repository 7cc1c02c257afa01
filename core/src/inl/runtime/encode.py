"""Plans written as the frames that a runner reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.runtime.plan import Admission, Chunk, Plan
from inl.runtime.runner import Limits
from inl.runtime.uniforms import uniform
from inl.spec.message import Row, admit_frame, release_frame, step_frame

if TYPE_CHECKING:
    from inl.spec.message import IntArray

STEP_NUMBERS = 1 << 31
"""Step numbers start again from 0 here on the wire, after a month of serving."""

FEEDBACK = (-1,)
"""Tokens of a decoding row: the one that the runner chose last."""


def frames(plan: Plan, limits: Limits) -> list[IntArray]:
    """Write a plan as messages, in the order in which the runner must have them."""
    found = [
        release_frame(slot, groups=limits.groups, width=limits.width)
        for slot in plan.releases
    ]
    found += [_admission(admission, limits) for admission in plan.admissions]
    if plan.bucket is not None:
        found.append(
            step_frame(
                plan.bucket,
                [_row(chunk) for chunk in plan.chunks],
                plan.cells,
                step=plan.step % STEP_NUMBERS,
                groups=limits.groups,
                block_size=limits.block_size,
                decode_rows=plan.decode_rows,
            )
        )
    return found


def _admission(admission: Admission, limits: Limits) -> IntArray:
    request = admission.request
    return admit_frame(
        request.slot,
        request.table,
        groups=limits.groups,
        width=limits.width,
        length=admission.length,
        adapter=request.adapter,
        temperature=request.temperature,
    )


def _row(chunk: Chunk) -> Row:
    request, start, stop = chunk
    fed = request.fed
    ids = FEEDBACK if start >= fed else request.tokens[start:stop]
    if request.temperature and stop >= fed:
        return Row(request.slot, ids, (uniform(request.seed, stop),))
    return Row(request.slot, ids)
