"""What the TPU simulator of the other tests finds: planted faults in small kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_simulator import races, simulated

SHAPE = (8, 128)
EVERYWHERE = pl.BlockSpec(memory_space=pl.ANY)


def run(body, seed, *scratch):
    """A kernel that may copy from ``x`` to a buffer, and writes ``out``."""
    x = jnp.arange(2 * SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(-1, SHAPE[1])
    found = pl.pallas_call(
        body,
        grid=(1,),
        in_specs=[EVERYWHERE],
        out_shape=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_shapes=[pltpu.VMEM(SHAPE, jnp.float32), *scratch],
        interpret=simulated(seed),
    )(x)
    return np.asarray(found), np.asarray(x)


def copied(x, buffer, done):
    return pltpu.make_async_copy(x.at[pl.ds(0, SHAPE[0])], buffer, done)


def right(x, out, buffer, done):
    copy = copied(x, buffer, done)
    copy.start()
    copy.wait()
    out[...] = buffer[...]


def early(x, out, buffer, done):
    copy = copied(x, buffer, done)
    copy.start()
    out[...] = buffer[...]
    copy.wait()


def unwritten(x, out, buffer, done):
    out[...] = buffer[...]


def outside(x, out, buffer, done):
    copy = copied(x, buffer, done)
    copy.start()
    copy.wait()
    out[...] = buffer[pl.ds(pl.program_id(0) + 4, SHAPE[0]), :]


@pytest.mark.parametrize("seed", range(3))
def test_a_right_kernel_is_accepted(seed):
    found, x = run(right, seed, pltpu.SemaphoreType.DMA)
    assert np.array_equal(found, x[: SHAPE[0]])
    assert not races()


@pytest.mark.parametrize("seed", range(3))
def test_a_read_before_its_copy_is_a_race_and_finds_no_data(seed):
    """``dma_execution_mode="on_wait"``: a copy has no effect until it is awaited."""
    found, _ = run(early, seed, pltpu.SemaphoreType.DMA)
    assert races()
    assert np.isnan(found).all()


def test_memory_that_was_not_written_is_nan():
    found, _ = run(unwritten, 0, pltpu.SemaphoreType.DMA)
    assert np.isnan(found).all()


def test_rows_out_of_bounds_are_nan():
    found, x = run(outside, 0, pltpu.SemaphoreType.DMA)
    assert np.array_equal(found[:4], x[4:8])
    assert np.isnan(found[4:]).all()
