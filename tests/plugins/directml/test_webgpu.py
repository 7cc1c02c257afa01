"""Programs on the WebGPU provider, where a Vulkan driver is found: software will do."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.errors import BackendUnavailable
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.testing.traffic import Traffic, play
from inl_directml import probe
from inl_directml.backend import DirectmlBackend

LIMITS = Limits(
    slots=4,
    blocks=(41,),
    block_size=4,
    max_blocks_per_seq=12,
    vocab=96,
    sampler="greedy",
)


@pytest.fixture(scope="module")
def webgpu_backend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INL_DIRECTML_PROVIDER", "webgpu")
        patch.setenv("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
        try:
            probe.probe()
            backend = DirectmlBackend(Device("directml:0"))
            # An adapter is requested by the first session.
            backend.tensor(probe_data()) + 1
        except (BackendUnavailable, RuntimeError) as error:
            pytest.skip(str(error).partition("\n")[0])
        return backend


def probe_data():
    from inl.dtypes import wrap

    return wrap(np.zeros(3, np.float32))


@pytest.mark.parametrize("seed", [4, 5])
def test_tokens_equal_the_float64_reference(webgpu_backend, seed):
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(seed), layers=2))
    runner = local_runner(webgpu_backend, MODEL, files, LIMITS)
    exact = ReferenceBackend(Device("reference:0"), dtype="float64")
    reference = local_runner(exact, MODEL, files, LIMITS, dtype="float64")

    def texts(which):
        rng = np.random.default_rng(seed)
        return play(which, Traffic(rng, runner.limits, sampler="greedy").frames(20))

    found = texts(runner)
    assert sum(map(len, found.values())) > 10
    assert found == texts(reference)
