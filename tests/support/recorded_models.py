"""The recorded INL models of tests/data, with their logits and greedy tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "data"


class Recorded:
    """A model of tests/data on a device, with its recorded logits and greedy tokens."""

    def __init__(self, version, device, *, language=None, kernels=None, **config):
        """device: the name of one, or a backend."""
        from inl.executor.model_loader import open_model
        from inl.plugin import make_backend

        self.language = language or open_model(DATA / version)
        if config:
            changed = replace(self.language.config, **config)
            self.language = replace(self.language, config=changed)
        named = isinstance(device, str)
        self.backend = make_backend(device) if named else device
        self.kernels = kernels
        expected = np.load(DATA / version / "expected.npz")
        self.prompts = [expected[f"prompt{i}"].tolist() for i in range(4)]
        self.logits = [expected[f"logits{i}"] for i in range(4)]
        self.greedy = [expected[f"greedy{i}"].tolist() for i in range(4)]

    def runner(self, *, blocks=60, block_size=8):
        from inl.runners.local_runner import Loaded, LocalRunner
        from inl.spec.limits import Limits
        from inl.spec.selection import KernelSelection
        from inl.weights.load import load_weights, stored_specs
        from inl.weights.plan import plan_weights

        model, checkpoint = self.language.model, self.language.checkpoint
        shaped = replace(self.language.config, dtype="float32")
        kernels = tuple(self.backend.kernels())
        if self.kernels:
            kernels = tuple(map(self.kernels, kernels))
        groups = plan_weights(model.weights(shaped), kernels, stored_specs(checkpoint))
        weights = load_weights(groups, checkpoint, self.backend, "float32")
        loaded = Loaded(model, shaped, groups, weights, KernelSelection(kernels))
        limits = Limits(
            slots=6, blocks=(blocks,), block_size=block_size, max_blocks_per_seq=16,
            vocab=self.language.config.vocab_size,
        )  # fmt: skip
        return Fed(LocalRunner(self.backend, loaded, limits))

    def core(self, *, replay=None, **limits):
        """Return an engine core, without a tokenizer; replay as the model needs it."""
        from inl.engine.core import EngineCore
        from inl.executor.model_loader import is_replayed
        from inl.scheduling.plan import SchedulerConfig

        runner = self.runner(**limits).runner
        replay = is_replayed(self.language) if replay is None else replay
        return EngineCore(runner, SchedulerConfig(replay=replay))


class Fed:
    """A runner; each call runs one step and returns the logits of its tokens."""

    def __init__(self, runner):
        self.runner, self.steps, self.cached = runner, 0, {}

    def admit(self, slot):
        from inl.spec.message import admit_frame

        limits = self.runner.limits
        # Scattered, and apart from those of other slots.
        blocks = [slot + 5 * place for place in range(limits.blocks[0] // 5 - 1)]
        self.runner.submit(
            admit_frame(
                slot,
                [blocks[: limits.max_blocks_per_seq]],
                groups=1,
                max_blocks_per_seq=limits.max_blocks_per_seq,
            )
        )

    def __call__(self, *rows, decoding=0, pads=(0, 0)):
        """rows: (slot, ids), decoding ones first. Returns [ids, V] of each row."""
        from inl.dtypes import widen
        from inl.spec.message import Row, step_frame
        from inl.spec.step import Bucket

        self.steps += 1
        counts = [len(ids) for _, ids in rows]
        width = max(counts)
        bucket = Bucket(sum(counts) + pads[0], len(rows) + pads[1], width)
        frame = step_frame(
            bucket,
            [Row(slot, ids) for slot, ids in rows],
            step=self.steps,
            groups=1,
            block_size=self.runner.limits.block_size,
            decode_rows=decoding,
        )
        found = widen(self.runner.logits(frame))
        if bucket.verifies:
            return np.split(found[: sum(counts)], np.cumsum(counts)[:-1])
        found = found.reshape(len(rows) + pads[1], width, -1)
        return [found[row, width - count :] for row, count in enumerate(counts)]
