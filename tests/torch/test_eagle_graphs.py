"""EAGLE-3 heads change no output of captured programs, and draft as they should."""

from __future__ import annotations

import pytest
import torch

from eagle_heads import PLAIN_REQUESTS, assert_backend_drafts
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl_torch.gpu import graphs
from simulated_graphs import simulated  # noqa: F401

REQUESTS = [PLAIN_REQUESTS[at] for at in (0, 1)]
"""At temperatures 0 and 0.8."""


def test_a_head_changes_no_output_of_simulated_graphs(simulated, tmp_path):  # noqa: F811
    backend, made = simulated
    settings = {"max_batch": 2, "sampling": "sample"}
    plain = ReferenceBackend(Device("reference"))
    assert_backend_drafts(backend, tmp_path, REQUESTS, plain=plain, **settings)
    assert sum(graph.replays for graph in made) > 3 * len(made) > 12


@pytest.mark.long
def test_inputs_that_stay_those_of_the_capture_are_detected(
    simulated,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    backend, _ = simulated
    call = graphs.CapturedStep.__call__

    def stale(self, weights, *arguments):
        if len(arguments) == 2 or self._graph is None:
            return call(self, weights, *arguments)
        message, _, state = arguments
        return call(self, weights, message, self._inputs[1], state)

    monkeypatch.setattr(graphs.CapturedStep, "__call__", stale)
    settings = {"max_batch": 2, "sampling": "sample"}
    with pytest.raises(AssertionError, match=r"after \d+ tokens"):
        assert_backend_drafts(backend, tmp_path, REQUESTS, **settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize(
    ("settings", "gap"),
    [({}, 1e-3), ({"dtype": "bfloat16", "invariant": True}, 0.5)],
    ids=["float32", "bfloat16"],
)
def test_a_head_changes_no_output_of_a_gpu(tmp_path, settings, gap):
    from inl_cuda.backend import CudaBackend

    backend = CudaBackend(Device("cuda:0"))
    assert_backend_drafts(backend, tmp_path, gap=gap, **settings)
