"""JAX's TPU simulator: copies as late as possible, unwritten memory NaN, races."""

from __future__ import annotations

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


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
