"""JAX's TPU simulator: copies as late as possible, unwritten memory NaN, races."""

from __future__ import annotations

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from inl.testing.op_check import judged, require_passed, run_checked


def simulated(seed=0):
    return pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode="on_wait",
        out_of_bounds_reads="uninitialized",
        uninitialized_memory="nan",
        random_seed=seed,
    )


def races():
    return interpret_pallas_call.races.races_found


def require_right(call, winner, seed=1):
    """Require that a kernel is chosen, and right without races; returns the verdict."""
    assert call.choice().winner == winner
    result = run_checked(call, seed)
    assert not races()
    return require_passed(judged(call, call.case, result), call, seed)
