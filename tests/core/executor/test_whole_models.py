"""A backend that computes the layers of a model at once, by ``WholeModels``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from inl.backend.base import Traits, WholeModels
from inl.backend.reference import ReferenceBackend
from inl.backend.simple import simple_backend
from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import wrap
from inl.executor.model_loader import start_runner
from inl.testing.oracle import Tiny, prompt_logits
from inl.testing.target import Target

IDS = [5, 9, 200, 31, 7]


def test_the_models_functions_are_those_of_the_capability():
    tiny = Tiny(Target(Device("reference:0")), "float32")
    reference = ReferenceBackend(Device("reference:0"))
    calls = []

    def replaced(model):
        def head(ops, config, w, carry, step):
            calls.append(len(w.layers))
            return model.head(ops, config, w, carry, step) * 2.0

        return replace(model, head=head)

    found = {}
    for name, capabilities in (("own", [WholeModels(replaced)]), ("plain", [])):
        backend = simple_backend(
            tensor=reference.tensor,
            numpy=lambda x: wrap(np.asarray(x)),
            kernels=reference.kernels,
            traits=Traits(dtypes=("float32",)),
            capabilities=capabilities,
        )(Device("reference:0"))
        config = EngineConfig(backend="reference", dtype="float32")
        runner = start_runner(tiny.language, backend, config, limits=tiny.limits())
        found[name] = prompt_logits(runner, IDS)
        assert runner.loaded.model is tiny.language.model
        executor = runner.executor
        assert (executor._model is tiny.language.model) == (name == "plain")
        runner.close()
        assert executor._model is tiny.language.model, "it may refer to the weights"
    assert calls == [2]
    assert np.array_equal(found["own"], 2 * found["plain"])
