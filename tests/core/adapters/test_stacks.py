"""Stacked matrices of adapters on ranks and on a mesh."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from inl.adapters.folder import read_adapter
from inl.adapters.stacks import AdapterStacks, _loras
from inl.adapters.weights import AdapterShape, with_adapters
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models.llama import MODEL
from inl.placement.mesh import TENSOR, Mesh
from inl.placement.placement import Placement
from inl.spec.tree import tree_map
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights
from lora_files import LoraFiles

RANKS = 2
SHAPE = AdapterShape(adapters=2, rank=4)


class MeshBackend:
    """Records how whole arrays are divided; ``cut`` returns the part of a device."""

    def __init__(self):
        self.axes = {}

    def offers(self, kind):
        if kind is Mesh:
            return Mesh(Placement(tensor=RANKS), self.place, 1, Mock(), Mock())
        return None

    def tensor(self, host):
        return host.data

    def place(self, host, axes, partial_sum):
        assert not partial_sum
        self.axes[id(host.data)] = host.data, axes
        return host.data

    def cut(self, array, rank):
        _, axes = self.axes[id(array)]
        if TENSOR not in axes:
            return array
        return np.split(array, RANKS, axes.index(TENSOR))[rank]


@pytest.fixture
def groups():
    config, tensors = tiny_llama(np.random.default_rng(7), kv_heads=2)
    tree = with_adapters(MODEL.weights(MODEL.config(config)))
    stored = stored_specs(MemoryCheckpoint(config, tensors))
    return tensors, plan_weights(tree, (), stored, ranks=RANKS)


def loaded(groups, backend, rank, folder):
    """The stacked matrices of all layers once an adapter is loaded."""
    stacks = AdapterStacks(groups, backend, "float32", SHAPE, rank)
    weights = tree_map(lambda _: None, groups)
    weights = stacks.attached(weights)
    adapter = read_adapter(folder, stacks.modules, SHAPE.rank)
    return _loras(stacks.load(weights, 2, adapter).model)


def test_a_device_of_a_mesh_has_what_a_rank_has(groups, tmp_path):
    tensors, plans = groups
    folder = LoraFiles(tensors, seed=1).write(tmp_path / "one")
    mesh = MeshBackend()
    whole = loaded(plans, mesh, 0, folder)
    divided = 0
    for rank in range(RANKS):
        backend = ReferenceBackend(Device("reference"), dtype="float32")
        parts = loaded(plans, backend, rank, folder)
        assert len(parts) == len(whole) > 10
        for lora, part in zip(whole, parts, strict=True):
            for array, own in zip(lora, part, strict=True):
                found = mesh.cut(array, rank)
                assert np.array_equal(found, own)
                assert found.any()
                divided += found.shape != array.shape
    assert divided == RANKS * len(whole)
