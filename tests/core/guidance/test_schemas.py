"""JSON schemas of many kinds: every output validates."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from depth import scaled
from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from json_schemas import schemas

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


def hash_engine():
    """The default model's tokenizer, and tokens that are random but for the masks."""
    model = open_model(resolve_model(None))
    limits = Limits(
        slots=33, blocks=(2_200,), block_size=16, max_blocks_per_seq=64,
        vocab=model.config.vocab_size, depth=2,
    )  # fmt: skip
    config = EngineConfig(max_batch=32, max_queued_requests=10_000)
    return InferenceEngine(model, config=config, runner=HashRunner(limits))


def cpu_engine():
    return InferenceEngine.from_pretrained(
        config=EngineConfig(backend="cpu", context=512, max_batch=16)
    )


@pytest.mark.scaled
@pytest.mark.parametrize(
    ("make", "count"),
    [(hash_engine, scaled(40, 300, 1_000)), (cpu_engine, scaled(2, 12, 24))],
    ids=["hashes", "default model"],
)
def test_every_output_validates(make, count, report):
    cases = schemas(count)
    with make() as engine:
        handles = [
            engine.submit(
                [1, 2, 3], structured={"json_schema": schema}, seed=seed,
                temperature=1.0, max_tokens=400,
            )
            for seed, schema in enumerate(cases)
        ]  # fmt: skip
        while not all(handle.completed for handle in handles):
            engine.step()
        stats = engine.stats
    ends = Counter()
    for schema, handle in zip(cases, handles, strict=True):
        completion = handle.completion()
        ends[completion.finish_reason] += 1
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
    masks, waited = stats.mask_seconds, stats.mask_wait_seconds
    report(
        f"{count} schemas: {dict(ends)}, {stats.steps} steps, masks "
        f"{1e3 * masks / stats.steps:.2f} ms a step, waited for "
        f"{1e3 * waited / stats.steps:.2f} ms"
    )
    assert ends == {"stop": count}
