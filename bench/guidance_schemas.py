"""Structured output of the default model: valid outputs, and masks hidden per step.

    python bench/guidance_schemas.py [--schemas 1000] [--device cpu] [--batch 16]

Generates one JSON document per schema, validates it with ``jsonschema``, and prints the
time to compute masks and the part of it for which steps waited.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import jsonschema

from inl import EngineConfig, InferenceEngine
from inl.errors import RequestError

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from json_schemas import schemas

TOKENS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    config = EngineConfig(
        backend=args.device,
        context=1024,
        max_batch=args.batch,
        max_queued_requests=10**6,
    )
    with InferenceEngine.from_pretrained(config=config) as engine:
        run(engine, schemas(args.schemas))


def run(engine: InferenceEngine, cases: list[dict]) -> None:
    ends, handles, compiling = Counter(), [], 0.0
    for seed, schema in enumerate(cases):
        started = time.perf_counter()
        try:
            handle = engine.submit(
                "A JSON document:", structured={"json_schema": schema}, seed=seed,
                temperature=0.8, max_tokens=TOKENS,
            )  # fmt: skip
        except RequestError as error:
            ends["not compiled"] += 1
            print(f"{error!s:.120}: {json.dumps(schema):.200}")
            continue
        finally:
            compiling += time.perf_counter() - started
        handles.append((schema, handle))
    before, started = engine.stats, time.perf_counter()
    while not all(handle.completed for _, handle in handles):
        engine.step()
    seconds, after = time.perf_counter() - started, engine.stats
    for schema, handle in handles:
        ends[validity(schema, handle.completion())] += 1
    steps = after.steps - before.steps
    masks = after.mask_seconds - before.mask_seconds
    waited = after.mask_wait_seconds - before.mask_wait_seconds
    tokens = sum(len(handle.token_ids) for _, handle in handles)
    print(", ".join(f"{count} {name}" for name, count in sorted(ends.items())))
    print(
        f"{tokens} tokens in {steps} steps, {seconds:.1f} s; "
        f"compiling {1e3 * compiling / len(cases):.2f} ms a schema; "
        f"masks {1e3 * masks / steps:.3f} ms a step, "
        f"{1e3 * waited / steps:.3f} ms exposed"
    )


def validity(schema: dict, completion: object) -> str:
    if completion.finish_reason != "stop":
        return completion.finish_reason
    try:
        jsonschema.validate(json.loads(completion.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"invalid: {completion.text!r} {error!s:.200} {json.dumps(schema)}")
        return "invalid"
    return "valid"


if __name__ == "__main__":
    main()
