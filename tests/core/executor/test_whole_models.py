"""A backend that computes the layers of a model at once, by ``WholeModels``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from inl.backend.base import Traits
from inl.backend.provisional import WholeModels
from inl.backend.reference import ReferenceBackend
from inl.backend.simple import simple_backend
from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import wrap
from inl.executor.loaded import Loaded
from inl.executor.model_executor import computed_model
from inl.runners.local_runner import start_runner
from inl.spec.selection import KernelSelection
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


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_an_optional_one_is_not_used_in_the_invariant_mode(optional, invariant):
    model = Tiny(Target(Device("reference:0")), "float32").language.model
    whole = WholeModels(replace, optional)  # a copy of the model
    backend = SimpleNamespace(offers={WholeModels: whole}.get)
    selection = KernelSelection((), invariant=invariant)
    for taps in ((), (1,)):
        loaded = Loaded(model, None, None, None, selection, taps=taps)
        used = computed_model(backend, loaded) is not model
        assert used == (not optional or not (invariant or taps))
