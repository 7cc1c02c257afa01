"""Steps of one row as one persistent kernel, beside float64. Needs a Hopper GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inl import EngineConfig
from inl.device import Device
from inl.dtypes import cast, widen
from inl.engine.core import EngineCore
from inl.errors import InlError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.scheduling.request import Request
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama
from inl_cuda import probe
from inl_cuda.backend import CudaBackend
from inl_cuda.persistent import model as persistent
from inl_cuda.persistent.program import PersistentStep
from inl_torch.gpu.backend import has_triton


def skip_reason() -> str | None:
    try:
        probe.probe()
    except InlError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "torch is built without CUDA"
    if torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return None if has_triton() else "needs Triton"


REASON = skip_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {"hidden": 576, "heads": 9, "kv_heads": 3, "inner": 1536, "layers": 3,
                "vocab": 4096, "tied": True},
    "small": {"hidden": 256, "heads": 4, "kv_heads": 4, "inner": 1152, "layers": 2,
              "vocab": 1002},
    "uneven": {"hidden": 320, "heads": 14, "kv_heads": 2, "inner": 1792, "layers": 1,
               "vocab": 514},
}  # fmt: skip
"""Of random models: 12 clusters; 12 with fewer warps; 14, with more heads than rows."""

CLOSE = 0.12
"""Most by which a log-probability differs from float64: keys and values are rounded to
bfloat16."""


class Tiny:
    """A random model, whose weights are numbers of bfloat16."""

    def __init__(self, name: str, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.hf, tensors = tiny_llama(rng, head_dim=64, **SHAPES[name])
        self.hf["max_position_embeddings"] = 4096
        rounded = {key: cast(each, "bfloat16") for key, each in tensors.items()}
        self.tensors = {key: widen(each) for key, each in rounded.items()}
        checkpoint = MemoryCheckpoint(self.hf, rounded)
        self.language = LanguageModel(MODEL, MODEL.config(self.hf), checkpoint)

    def core(self, **options: Any) -> EngineCore:
        given = {"context": 2600, "max_batch": 4, "cache_bytes": 1 << 27, **options}
        config = EngineConfig(backend="cuda:0", dtype="bfloat16", **given)
        backend = CudaBackend(Device("cuda:0"))
        return EngineCore(start_runner(self.language, backend, config))

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        rng = np.random.default_rng(seed)
        return [int(each) for each in rng.integers(0, self.hf["vocab_size"], length)]

    def check(
        self, request: Request, close: float = CLOSE, *, greedy: bool = True
    ) -> None:
        """Compare the log-probabilities of a request with float64."""
        count = len(request.output_ids)
        exact = plain_logits(self.hf, self.tensors, request.tokens[:-1])[-count:]
        exact -= exact.max(-1, keepdims=True)
        exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
        for row, found in zip(exact, request.token_logprobs, strict=True):
            assert max(abs(row[token] - value) for token, value in found.top) < close
        if greedy and not request.temperature:
            chosen = np.take_along_axis(exact, np.array(request.output_ids)[:, None], 1)
            assert (exact.max(-1) - chosen[:, 0]).max() < 2 * close


class Seen:
    """Persistent steps that were made, and how often they were called."""

    def __init__(self) -> None:
        self.made: list[PersistentStep] = []
        self.calls = 0


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    result = Seen()

    class Counted(PersistentStep):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            result.made.append(self)

        def logits(self, *args: Any) -> torch.Tensor:
            result.calls += 1
            return super().logits(*args)

    monkeypatch.setattr(persistent, "PersistentStep", Counted)
    return result


def run(core: EngineCore, *requests: Request) -> None:
    for request in requests:
        core.add(request)
    assert not [event.error for event in ended(core) if event.error]


def ended(core: EngineCore) -> Iterator[Any]:
    while core.has_work:
        yield from core.step()


def request(ids: list[int], count: int, **options: Any) -> Request:
    return Request(ids, max_tokens=count, logprobs=20, **options)


@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_those_of_float64(name: str, seen: Seen) -> None:
    tiny = Tiny(name)
    core = tiny.core()
    for length, count in ((1, 20), (15, 4), (16, 20), (130, 40), (2090, 20)):
        one = request(tiny.prompt(length, length), count)
        run(core, one)
        tiny.check(one)
    assert len(seen.made) == 1
    assert seen.calls
    # The cheapest sampler has a graph of its own; the same answer again has equal bits.
    answers = []
    for _ in range(2):
        one = Request(tiny.prompt(130, 130), max_tokens=40)
        run(core, one)
        answers.append(one.output_ids)
    assert answers[0] == answers[1]
    core.runner.close()


def test_keys_and_values_are_those_of_the_graph(seen: Seen) -> None:
    """A batch of one row, then two, then one again reads what both have written."""
    tiny = Tiny("smollm2")
    core = tiny.core()
    first = request(tiny.prompt(40, 1), 90)
    second = request(tiny.prompt(25, 2), 20)
    core.add(first)
    while len(first.output_ids) < 30:
        core.step()
    run(core, second)
    tiny.check(first)
    tiny.check(second)
    # The prompt of the third is in the cache, written by steps of one row.
    third = request([*first.tokens, 5], 20)
    run(core, third)
    tiny.check(third)
    assert seen.calls
    core.runner.close()


def test_sampled_answers_have_the_probabilities_of_float64() -> None:
    tiny = Tiny("smollm2")
    core = tiny.core()
    answers = []
    for options in ({}, {"top_k": 40, "top_p": 0.9}, {}):
        one = request(tiny.prompt(33), 40, temperature=0.8, seed=5, **options)
        run(core, one)
        tiny.check(one)
        answers.append(one.output_ids)
    assert answers[0] == answers[2]
    plain = Request(tiny.prompt(33), max_tokens=40, temperature=0.8, seed=5)
    run(core, plain)
    assert plain.output_ids == answers[0]
    core.runner.close()


def test_masked_steps_take_the_logits_of_the_kernel(seen: Seen) -> None:
    tiny = Tiny("small")
    core = tiny.core()
    allowed = [3, 70, 500, 1001]
    one = request(tiny.prompt(20), 12, allowed_token_ids=allowed)
    run(core, one)
    tiny.check(one, greedy=False)
    assert set(one.output_ids) <= set(allowed)
    exact = plain_logits(tiny.hf, tiny.tensors, one.tokens[:-1])[-12:, allowed]
    chosen = [allowed.index(token) for token in one.output_ids]
    assert (exact.max(-1) - exact[range(12), chosen]).max() < 2 * CLOSE
    assert seen.calls
    core.runner.close()


def test_flags_begin_again_after_all_their_values(seen: Seen) -> None:
    tiny = Tiny("small")
    core = tiny.core()
    run(core, request(tiny.prompt(9), 4))
    (step,) = seen.made
    with torch.inference_mode():
        step._steps.fill_((1 << 26) - 3)
    one = request(tiny.prompt(20), 12)
    run(core, one)
    tiny.check(one)
    assert int(step._steps) < 100
    core.runner.close()


def test_two_engines_at_once(seen: Seen) -> None:
    """Each in a thread, on a stream of its own, beside products of another stream."""
    models = [Tiny("smollm2", seed) for seed in (3, 4)]
    cores = [tiny.core() for tiny in models]
    requests: list[list[Request]] = [[], []]
    errors: list[Exception] = []
    done = threading.Event()

    def serve(number: int, turns: int) -> None:
        for turn in range(turns):
            one = request(models[number].prompt(20 + turn, turn), 300)
            run(cores[number], one)
            requests[number].append(one)

    def serve_on_a_stream(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                serve(number, 8)
        except Exception as error:
            errors.append(error)

    for number in range(2):  # graphs are captured by one thread at a time
        serve(number, 1)

    def multiply() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(3000, 3000, device="cuda", dtype=torch.bfloat16)
            while not done.is_set():
                for _ in range(20):
                    x @ x
                torch.cuda.current_stream().synchronize()

    threads = [
        threading.Thread(target=serve_on_a_stream, args=(number,))
        for number in range(2)
    ]
    noise = threading.Thread(target=multiply)
    for thread in (*threads, noise):
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "steps wait for each other"
    done.set()
    noise.join()
    assert not errors
    for tiny, answered in zip(models, requests, strict=True):
        for one in answered:
            tiny.check(one)
    assert len(seen.made) == 2
    for core in cores:
        core.runner.close()


@pytest.mark.parametrize("options", [{"invariant": True}, {"max_adapters": 1}], ids=str)
def test_modes_of_ops_use_the_graph(options: dict[str, Any], seen: Seen) -> None:
    tiny = Tiny("small")
    core = tiny.core(**options)
    one = request(tiny.prompt(20), 8)
    run(core, one)
    tiny.check(one, close=0.2)
    assert not seen.made
    core.runner.close()


def test_a_setting_selects_the_graph(monkeypatch: Any, seen: Seen) -> None:
    monkeypatch.setenv("INL_CUDA_PERSISTENT", "0")
    tiny = Tiny("small")
    core = tiny.core()
    one = request(tiny.prompt(20), 8)
    run(core, one)
    tiny.check(one, close=0.2)
    assert not seen.made
    core.runner.close()


def test_a_closed_engine_frees_its_copies(seen: Seen) -> None:
    tiny = Tiny("smollm2")
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        core = tiny.core()
        run(core, request(tiny.prompt(20), 4))
        core.runner.close()
        seen.made.clear()
    assert torch.cuda.memory_allocated() - before < 4 << 20
