"""Answers of the default model compared with the oracle's, on any device."""

from __future__ import annotations

import json
from pathlib import Path


def follows_oracle(model: Path, oracle: Path, device: str, dtype: str) -> bool:
    """Compare the answers with the oracle's under the gap rule; float32 exactly, one
    at a time.

    model: the default model's file. oracle: ``tests/data/smollm2-oracle.json``. Prints
    how many are equal and how many differ only as the rule allows.
    """
    from inl import EngineConfig, InferenceEngine
    from inl.testing.near_tie import compare

    cases = json.loads(oracle.read_text("utf-8"))["cases"]
    config = EngineConfig(backend=device, dtype=dtype, max_batch=9, context=512)
    with InferenceEngine.from_pretrained(str(model), config) as engine:
        prompts = [case["prompt_ids"] for case in cases]
        counts = [len(case["token_ids"]) for case in cases]
        alone = [
            engine.generate(ids, max_tokens=count).token_ids
            for ids, count in zip(prompts, counts, strict=True)
        ]
        batched = [
            answer.token_ids for answer in engine.generate(prompts, max_tokens=64)
        ]
    right = True
    for name, answers, exact in (
        ("alone", alone, dtype == "float32"), ("batched", batched, False)
    ):  # fmt: skip
        compared = [
            compare(list(found), case["token_ids"], case["margins"])
            for found, case in zip(answers, cases, strict=True)
        ]
        equal = sum(each.gap is None for each in compared)
        allowed = sum(each.allowed(dtype) for each in compared)
        right &= allowed == len(cases) and (equal == len(cases) or not exact)
        print(f"  {dtype} {name}: {equal} of {len(cases)} equal, {allowed} allowed")
    return right


def checks_pass(device: str) -> bool:
    """Run the conformance kit as ``inl check`` does; print a line per section."""
    from inl.device import Device
    from inl.testing.card import by_section
    from inl.testing.conformance import check_all
    from inl.testing.findings import findings
    from inl.testing.target import Target, default_seed

    results = check_all(Target(Device(device), seed=default_seed()))
    for section, mine in by_section(results).items():
        passed = sum(result.status == "passed" for result in mine)
        print(f"  {section}: {passed} of {len(mine)} passed")
    failed = [result for result in results if result.status == "failed"]
    for finding in findings(results)[:10]:
        print("  " + "\n  ".join(finding.lines()))
    print(f"inl check {device}: {len(results) - len(failed)} of {len(results)} passed")
    return bool(results) and not failed
