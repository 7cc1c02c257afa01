"""INL models on ``jax.jit``: the same files, ops and answers."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="module")
def device(jax_module):
    return jax_module.jax_backend()("jax:0")


def test_greedy_answers(device, recorded, answered):
    known = recorded("inl-v040", device)
    assert answered(known.core(), known.prompts, 24) == known.greedy


def test_answers_with_carried_velocities(
    device, recorded, answered, plain_deep, deep_made
):
    known = recorded("inl-v013", device, velocity="carry")
    core = known.core(blocks=14)
    prompts = [*known.prompts, known.prompts[2][:8]]
    found = answered(core, prompts, 24)
    assert core.stats.preemptions > 0
    for ids, answer in zip(prompts, found, strict=True):
        plain = plain_deep(*deep_made, prompt=len(ids), carry=True)
        logits = [plain.feed(token) for token in [*ids, *answer]]
        assert answer == np.argmax(logits[len(ids) - 1 : -1], axis=-1).tolist()
