"""Sampling on torch against the distribution of transformers' logits processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import generation

from inl.ops.step import empty_tables
from inl.spec.message import Row, step_frame
from inl.spec.step import NEUTRAL, PARAMS, Bucket, Tables
from inl_torch.eager.sample import sample
from inl_torch.eager.step import make_step

VOCAB, SAMPLES = 83, 4000


@pytest.fixture
def logits(seed):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(2.5 * rng.standard_normal(VOCAB)).float()


def shares(logits, prompt, params):
    """Frequency of each token over evenly spaced uniform numbers."""
    tables = empty_tables(
        groups=1, slots=SAMPLES + 1, max_blocks_per_seq=1, vocab=VOCAB
    )
    tables.params[:] = [params.get(name, value) for name, value in zip(
        PARAMS, NEUTRAL, strict=True
    )]  # fmt: skip
    tables.token_counts[:, list(prompt)] = 1
    tables = Tables(*(torch.from_numpy(array) for array in tables))
    bucket = Bucket(SAMPLES, SAMPLES, 1, "sample_filtered")
    message = step_frame(
        bucket,
        [Row(1 + row, [0], [(row + 0.5) / SAMPLES]) for row in range(SAMPLES)],
        step=0, groups=1, block_size=4, decode_rows=0,
    )  # fmt: skip
    step, tables = make_step(
        torch.from_numpy(message), tables, bucket=bucket, block_size=4
    )
    tokens, _ = sample(
        logits.expand(SAMPLES, -1), step, tables, sampler="sample_filtered"
    )
    return torch.bincount(tokens.long(), minlength=VOCAB) / SAMPLES


def transformers_probabilities(logits, prompt, params):
    """Probabilities by transformers' processors, in its order."""
    chain = generation.LogitsProcessorList()
    if "repetition_penalty" in params:
        penalty = generation.RepetitionPenaltyLogitsProcessor
        chain.append(penalty(params["repetition_penalty"]))
    chain.append(generation.TemperatureLogitsWarper(params["temperature"]))
    for name, kind, cast in (
        ("top_k", generation.TopKLogitsWarper, int),
        ("top_p", generation.TopPLogitsWarper, float),
        ("min_p", generation.MinPLogitsWarper, float),
    ):
        if name in params:
            chain.append(kind(cast(params[name])))
    return chain(torch.tensor([prompt]), logits[None].clone()).softmax(-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.3, "top_k": VOCAB},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.5, "top_p": 0.05},
        {"temperature": 1.1, "min_p": 0.07},
        {"temperature": 1.0, "repetition_penalty": 1.4},
        {"temperature": 1.0, "repetition_penalty": 0.5},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.8, "repetition_penalty": 1.2, "top_k": 30, "top_p": 0.7},
    ],
    ids=str,
)
def test_samples_follow_the_distribution_of_transformers(logits, seed, params):
    prompt = [3, 4, 40, 41, 41]
    found = shares(logits, prompt, params)
    wanted = transformers_probabilities(logits, prompt, params)
    assert (found - wanted).abs().max() <= 1.01 / SAMPLES, f"seed {seed}"
    assert not found[wanted == 0].any(), f"seed {seed}"


def test_this_comparison_can_fail(logits):
    found = shares(logits, [3], {"temperature": 1.0, "top_k": 5})
    wanted = transformers_probabilities(logits, [3], {"temperature": 1.0, "top_k": 6})
    assert (found - wanted).abs().max() > 1.01 / SAMPLES
