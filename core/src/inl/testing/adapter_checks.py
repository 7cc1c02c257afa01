"""Check of adapters on a device: each request gets the answer of its own weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inl.adapters.folder import Adapter, LoraPair
from inl.dtypes import rounded
from inl.engine.core import EngineCore
from inl.scheduling.request import Request
from inl.testing.check import Measure, equal, worst

if TYPE_CHECKING:
    from inl.testing.oracle import Tiny

RANK, COUNT = 4, 8
NAMES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def answers_with_adapters(tiny: Tiny) -> Measure:
    """Two adapters and the model itself, in one batch, answer as merged weights do.

    The second adapter is loaded while requests of the first one run, in place of
    another.
    """
    rng, vocab = tiny.target.rng("adapters"), len(tiny.tensors["lm_head.weight"])
    prompts = [
        [int(x) for x in rng.integers(0, vocab, n)] for n in (5, 19, 3, 11, 2, 9)
    ]
    numbers = [0, 1, 2, 2, 1, 0]
    adapters = {number: _adapter(tiny, number, RANK - number) for number in (1, 2, 3)}
    runner = tiny.runner(adapters=2, adapter_rank=RANK)
    core = EngineCore(runner)

    def load(number: int, adapter: Adapter) -> None:
        runner.executor.load_adapter(number, adapter)
        core.scheduler.adapters[number] = adapter.digest

    def add(at: int) -> Request:
        number = numbers[at]
        digest = adapters[number].digest if number else ""
        request = Request(
            prompts[at], max_tokens=COUNT, adapter=number, adapter_digest=digest
        )
        core.add(request)
        return request

    try:
        load(2, adapters[3])
        load(1, adapters[1])
        requests = [add(0), add(1)]
        core.step()
        load(2, adapters[2])
        requests += [add(at) for at in range(2, len(prompts))]
        while core.has_work:
            core.step()
    finally:
        runner.close()
    measures = []
    for prompt, number, request in zip(prompts, numbers, requests, strict=True):
        equal(f"error of a request of adapter {number}", request.error, None)
        merged = _merged(tiny, adapters[number]) if number else tiny
        measures.append(merged.judge(prompt, request.output_ids))
    return worst(measures)


def _adapter(tiny: Tiny, number: int, rank: int) -> Adapter:
    """Return a random adapter of some layers, with values of the model's dtype."""
    rng = tiny.target.rng("adapter", number)
    modules: dict[str, LoraPair] = {}
    for name, weight in tiny.tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(NAMES):
            continue
        rows, columns = weight.shape
        a = rng.standard_normal((rank, columns)) / columns**0.5
        b = rng.standard_normal((rows, rank)) / rank**0.5
        modules[module] = LoraPair(
            *(rounded(x.astype("float32"), tiny.dtype) for x in (a, b))
        )
    return Adapter(f"adapter {number}", f"digest {number}", modules)


def _merged(tiny: Tiny, adapter: Adapter) -> Any:
    """Return an oracle of the model with the adapter in its weights."""
    merged = type(tiny)(tiny.target, tiny.dtype)
    for module, pair in adapter.modules.items():
        name = f"{module}.weight"
        merged.tensors[name] = tiny.tensors[name] + pair.b @ pair.a
    return merged
