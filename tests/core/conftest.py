"""Reference sampling, and engines on tiny models and on the hash runner."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from byte_tokens import bytes_as_tokens
from hash_oracle import expected
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from tiny_engines import VOCAB
from tiny_engines import drained as drained
from tiny_engines import engines as engines
from tiny_engines import tiny_made as tiny_made
from tiny_engines import without_backend as without_backend


@pytest.fixture(scope="session")
def byte_tokenizer():
    return bytes_as_tokens()


def changed(logits, prompt, answer, *, repetition, presence, frequency, bias):
    """Logits after penalties and bias, one token at a time."""
    found = []
    for token, logit in enumerate(logits):
        value = float(logit)
        if token in prompt or token in answer:
            value = value / repetition if value > 0 else value * repetition
        times = list(answer).count(token)
        value -= frequency * times
        value -= presence if times else 0.0
        found.append(value + bias.get(token, 0.0))
    return found


def kept_tokens(logits, *, top_k, top_p, min_p):
    """Ids that pass the filters, in descending order, and their odds."""
    best = max(logits)
    odds = {token: math.exp(value - best) for token, value in enumerate(logits)}
    order = sorted(odds, key=lambda token: (-logits[token], token))
    order = order[:top_k] if top_k else order
    total, before, left = sum(odds[token] for token in order), 0.0, []
    for token in order:
        if left and top_p < 1 and before >= top_p * total:
            break
        before += odds[token]
        left.append(token)
    return [t for at, t in enumerate(left) if not at or odds[t] >= min_p], odds


def plainly(logits, prompt=(), answer=(), uniform=0.0, **params):
    """The token that the documentation of "sample_filtered" sampling names."""
    single = {
        name: float(np.float32(params.get(name, neutral)))
        for name, neutral in {
            "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }.items()
    }  # fmt: skip
    bias = params.get("logit_bias") or {}
    new = changed(
        logits, prompt, answer,
        repetition=single["repetition_penalty"], presence=single["presence_penalty"],
        frequency=single["frequency_penalty"],
        bias={token: float(np.float32(value)) for token, value in bias.items()},
    )  # fmt: skip
    if single["temperature"] == 0:
        return new.index(max(new))
    scaled = [(value - max(new)) / single["temperature"] for value in new]
    left, odds = kept_tokens(
        scaled,
        top_k=int(single["top_k"]), top_p=single["top_p"], min_p=single["min_p"],
    )  # fmt: skip
    total, mass = sum(odds[token] for token in left), 0.0
    for token in sorted(left):
        mass += odds[token]
        if mass > uniform * total:
            return token
    return max(left)


@pytest.fixture(scope="session")
def plain_choice():
    return plainly


@pytest.fixture
def hashed(engines):
    """Makes engines on HashRunner: fast, and scheduling faults change the output."""

    def make(*, runner=HashRunner, blocks=200, depth=2, **settings):
        limits = Limits(
            slots=settings.get("max_batch", 8) + 1, blocks=(blocks,), block_size=4,
            max_blocks_per_seq=32, vocab=VOCAB, depth=depth,
        )  # fmt: skip
        settings = {"max_batch": 8, "context": 120} | settings
        return engines(runner=runner(limits), **settings)

    return make


@pytest.fixture
def report(capsys):
    """Print a line even if the test passes."""

    def show(line):
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return show


@pytest.fixture
def small():
    """Limits of a runner with 8 usable blocks of 4 tokens; keywords change fields."""

    def make(**changes):
        values = {
            "slots": 5,
            "blocks": (9,),
            "block_size": 4,
            "max_blocks_per_seq": 8,
            "vocab": 100,
            **changes,
        }
        return Limits(**values)

    return make


@pytest.fixture
def answer_of():
    """The answer to a request that neither context nor an end token cuts short."""

    def answer(request, limits):
        return expected(request, limits, limits.max_tokens, request.stop_ids)[0]

    return answer
