from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import pytest
import torch

from depth import seed_of
from inl.backend.base import DeviceMemory, Traits
from inl.backend.host import host_memory
from inl.checkpoints.checkpoint import Checkpoint
from inl.device import Device
from inl.dtypes import cast, widen, wrap
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.runners.local_runner import Loaded, LocalRunner
from inl.spec.limits import Limits
from inl.spec.selection import KernelSelection
from inl.spec.tolerance import stored
from inl.spec.tree import leaves, tree_map
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import check_tensors, plan_weights
from inl_torch.backend import TorchBackend
from inl_torch.tensors import from_host, to_host

ROTATIONS = ("cos", "sin")


@final
class PlainTorch(TorchBackend):
    traits = Traits(dtypes=("float32", "bfloat16", "float16"))

    def __init__(self, device: Device, place: str = "cpu") -> None:
        self.device = device
        self.place = torch.device(place)

    def memory(self) -> DeviceMemory:
        return host_memory()


@pytest.fixture(scope="session")
def backend():
    return PlainTorch(Device("cpu:0"))


@pytest.fixture(scope="session")
def meta_backend():
    return PlainTorch(Device("cpu:0"), "meta")


@pytest.fixture
def seed(request):
    """A seed of the test, another one in every run at long depth."""
    return seed_of(request.node.nodeid)


@pytest.fixture(scope="session")
def on_torch():
    """A case's arguments as tensors, floats in the storage dtype."""

    def convert(spec, case, dtype, place="cpu"):
        rounded = stored(case, dtype, np.float32)

        def tensor(before, after, target):
            if np.asarray(before).dtype.name != "float64":
                target = wrap(np.asarray(after)).dtype
            return from_host(cast(np.asarray(after), target)).to(place)

        arguments = []
        for name, before, after in zip(
            spec.parameters, case.args, rounded, strict=True
        ):
            target = "float32" if name in ROTATIONS else dtype
            originals = leaves(before)
            arguments.append(
                tree_map(lambda a, o=originals, t=target: tensor(next(o), a, t), after)
            )
        return tuple(arguments)

    return convert


@pytest.fixture(scope="session")
def on_host():
    """Converts results to NumPy arrays."""
    return lambda result: tree_map(lambda x: widen(to_host(x)), result)


class MemoryCheckpoint(Checkpoint):
    """A checkpoint in memory."""

    path = Path("memory")
    eos_token_ids = ()
    chat_template = None

    def __init__(self, config, tensors):
        self.config, self._tensors = config, tensors

    def names(self):
        return list(self._tensors)

    def spec(self, name):
        return self._tensors[name].dtype, self._tensors[name].shape

    def tensor(self, name):
        return self._tensors[name]

    def tokenizer(self):
        raise self.missing("tokenizer")

    def close(self):
        self._tensors = {}


class Tiny(NamedTuple):
    """A small random Llama, to be loaded on any backend."""

    config: Any
    checkpoint: MemoryCheckpoint

    def load(self, backend, dtype) -> Loaded:
        config = replace(self.config, dtype=dtype)
        kernels = tuple(backend.kernels())
        held = stored_specs(self.checkpoint)
        groups = plan_weights(MODEL.weights(config), kernels, held)
        check_tensors(groups, held, "memory")
        weights = load_weights(groups, self.checkpoint, backend, dtype)
        return Loaded(MODEL, config, groups, weights, KernelSelection(kernels))

    def runner(self, backend, dtype, limits: Limits) -> LocalRunner:
        return LocalRunner(backend, self.load(backend, dtype), limits)


@pytest.fixture(scope="session")
def tiny_llama():
    def make(seed, *, bias=False, **fields):
        hf = {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "attention_bias": bias,
            **fields,
        }
        config = MODEL.config(hf)
        rng = np.random.default_rng(seed)
        tensors = {}
        for group in leaves(MODEL.weights(config)):
            for param in group.params.values():
                scale = 1.0 if len(param.shape) == 1 else param.shape[-1] ** -0.5
                numbers = scale * rng.standard_normal(param.shape)
                if "norm" in param.source:
                    numbers = 1 + 0.1 * numbers
                tensors.setdefault(param.source, cast(numbers, "float32"))
        return Tiny(config, MemoryCheckpoint(hf, tensors))

    return make


@pytest.fixture(scope="session")
def ops_catalog():
    return catalog()
