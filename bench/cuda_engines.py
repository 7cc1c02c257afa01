"""Engines for ``cuda_serve.py``: of a file, or of a model shape with random weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from random_models import SHAPES, Random, random_language

from inl.config import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.inference_engine import InferenceEngine
from inl.executor.load_plan import kernel_selection
from inl.executor.model_loader import open_model
from inl.runners.local_runner import Loaded, LocalRunner, start_runner
from inl.scheduling.plan import SchedulerConfig as SchedulerPolicy
from inl.scheduling.request import Request
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.selection import KernelSelection
from inl.spec.tree import leaves, tree_map
from inl.weights.load import load_weights
from inl.weights.plan import plan_weights
from inl_cuda.backend import CudaBackend


def load(
    backend: CudaBackend, name: str, layers: int = 0, quantize: str = "", *,
    weight_copies: bool = False,
) -> tuple[Loaded, Random]:  # fmt: skip
    """Make a model of random weights: one layer, of which the others are copies.

    quantize, weight_copies: as of ``EngineConfig``.
    """
    count = layers or SHAPES[name][3]
    language = random_language(name, context=1 << 17, layers=1, quantize=quantize)
    model, one, checkpoint = language.model, language.config, language.checkpoint
    kernels = kernels_of(backend, quantize, weight_copies=weight_copies)
    groups = plan_weights(model.weights(one), kernels, checkpoint.specs)
    weights = load_weights(groups, checkpoint, backend, "bfloat16")
    (layer,) = weights.layers
    more = [tree_map(torch.clone, layer) for _ in range(count - 1)]
    config = replace(one, layers=count, views=one.views * count)
    groups = groups._replace(layers=groups.layers * count)
    weights = weights._replace(layers=(layer, *more))
    return Loaded(model, config, groups, weights, KernelSelection(kernels)), checkpoint


def kernels_of(
    backend: CudaBackend, quantize: str, *, weight_copies: bool = False
) -> tuple[Kernel, ...]:
    """Return the kernels of an engine with these options."""
    config = EngineConfig(quantize=quantize or None)
    return kernel_selection(backend, config, copies=weight_copies).kernels


def weight_bytes(weights: Any) -> int:
    """Fewest bytes read per token: each tensor once, but one row of the embedding."""
    stores = (x.untyped_storage() for x in leaves(weights._replace(embed=None)))
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


@dataclass
class Serving:
    """An engine core, or a whole engine, and its batch size."""

    runner: LocalRunner
    core: EngineCore
    engine: InferenceEngine | None = None

    @classmethod
    def shape(
        cls, backend: CudaBackend, loaded: Loaded, rows: int, context: int, budget: int
    ) -> Serving:
        size = backend.traits.block_size
        width = -(-context // size)
        limits = Limits(
            rows + 1, (width * rows + 1,), size, width, loaded.config.vocab_size,
            sampler="greedy", windows=(None,), token_budget=budget,
        )  # fmt: skip
        runner = LocalRunner(backend, loaded, limits)
        policy = SchedulerPolicy(
            token_budget=budget, context=context, prefix_cache=False
        )
        return cls(runner, EngineCore(runner, policy))

    @classmethod
    def file(
        cls, backend: CudaBackend, path: str, rows: int, context: int, budget: int
    ) -> Serving:
        language = open_model(path)
        per_token = 2 * len(language.model.state(language.config)[0].layers)
        per_token *= 2 * language.config.kv_heads * language.config.head_dim
        config = EngineConfig(
            backend="cuda:0", max_batch=rows, token_budget=budget, context=context,
            sampling="greedy", prefix_cache=False,
            cache_bytes=rows * (context + 64) * per_token,
        )  # fmt: skip
        runner = start_runner(language, backend, config)
        engine = InferenceEngine(language, config=config, runner=runner)
        return cls(runner, engine.core, engine)

    def settle(self) -> None:
        """Freeze loaded objects for the garbage collector, as a worker does."""
        gc.collect()
        gc.freeze()

    def answer(
        self, prompts: list[list[int]], tokens: int, stop: Sequence[str] = ()
    ) -> float:
        """Seconds until all requests have finished."""
        if self.engine is None:
            return self.answer_ids(prompts, tokens)
        torch.cuda.synchronize()
        start = time.perf_counter()
        done = self.engine.generate(
            prompts, max_tokens=tokens, ignore_eos=True, stop=stop
        )
        spent = time.perf_counter() - start
        got = sum(len(answer.token_ids) for answer in done)
        assert got == len(prompts) * tokens, f"{got} tokens"
        return spent

    def answer_ids(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds until all requests have finished, with the engine core only."""
        torch.cuda.synchronize()
        start, got = time.perf_counter(), 0
        for prompt in prompts:
            self.core.add(Request(prompt, max_tokens=tokens, ignore_eos=True))
        while self.core.has_work:
            for event in self.core.step():
                if event.error is not None:
                    raise event.error
                got += event.token is not None
        spent = time.perf_counter() - start
        assert got == len(prompts) * tokens, f"{got} tokens"
        return spent

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        else:
            self.runner.close()
        gc.unfreeze()
        torch.cuda.empty_cache()


def random_prompts(rng: Any, count: int, length: int, vocab: int) -> list[list[int]]:
    return [rng.integers(3, vocab, length).tolist() for _ in range(count)]
