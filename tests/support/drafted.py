"""The same requests with and without drafts: their outputs must be equal."""

from __future__ import annotations

import numpy as np

from inl.scheduling.request import Request
from inl.speculation.drafters import NgramDrafter, SyntheticDrafter
from toy_guide import ToyGrammar, ToyGuide

REQUESTS = (
    {"max_tokens": 24},
    {"max_tokens": 24, "temperature": 0.8, "seed": 3},
    {
        "max_tokens": 20, "temperature": 0.8, "seed": 4, "top_k": 9, "top_p": 0.9,
        "repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3,
        "logprobs": 2,
    },
    {"max_tokens": 24, "repetition_penalty": 1.6, "logit_bias": {7: 4.0}},
    {"max_tokens": 24, "temperature": 1.1, "seed": 5, "stop": ["e", "\x07"]},
    {
        "max_tokens": 16, "allowed_token_ids": range(40, 60), "temperature": 0.8,
        "seed": 2,
    },
    {"max_tokens": 24, "temperature": 0.8, "seed": 9, "min_p": 0.05},
    # Repeats itself, so that n-grams are found.
    {"max_tokens": 40, "logit_bias": {7: 60.0, 9: 60.0}, "temperature": 9, "seed": 1},
)  # fmt: skip
"""Options of each prompt."""


def prompts(vocab):
    """Prompts of different lengths, some of which repeat themselves."""
    rng = np.random.default_rng(3)
    return [
        [int(token) for token in rng.integers(0, vocab, 5 + at % 3)] * (1 + at % 4)
        for at in range(len(REQUESTS))
    ]


def outputs(engine, vocab, requests=REQUESTS):
    """Submit all requests, run them in one batch and return the completions."""
    handles = [
        engine.submit(prompt, ignore_eos=True, **options)
        for prompt, options in zip(prompts(vocab), requests, strict=False)
    ]
    while not all(handle.completed for handle in handles):
        engine.step()
    return [handle.completion() for handle in handles]


def told(completions):
    """What must be equal; log-probabilities only nearly."""
    return [(each.token_ids, each.text, each.finish_reason) for each in completions]


def assert_equal_outputs(make, vocab, acceptance, requests=REQUESTS):
    """Compare an engine without drafts with one that verifies them.

    make: (speculates, drafter) -> engine. acceptance: of a SyntheticDrafter, ``None``
    for n-grams. Returns the speculation, for its counts.
    """
    plain = outputs(make(False, None), vocab, requests)
    drafter = NgramDrafter()
    if acceptance is not None:
        pairs = zip(prompts(vocab), plain, strict=False)
        texts = {tuple(prompt): each.token_ids for prompt, each in pairs}
        drafter = SyntheticDrafter(texts, acceptance)
    engine = make(True, drafter)
    drafted = outputs(engine, vocab, requests)
    for at, (one, other) in enumerate(zip(told(drafted), told(plain), strict=True)):
        assert one == other, f"request {at}"
    for one, other in zip(plain, drafted, strict=True):
        if one.logprobs is None:
            assert other.logprobs is None
            continue
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert left.token == right.token
            assert abs(left.logprob - right.logprob) < 1e-3
            assert [token for token, _ in left.top] == [t for t, _ in right.top]
    return engine.speculation


def guided_texts(engine, vocab, temperatures=(0.0, 0.8, 0.8)):
    """Outputs of requests with grammars, and of one without, in one batch."""
    requests = [
        Request(
            prompt, max_tokens=30, temperature=temperature, seed=at,
            guide=long_guide(at, vocab),
        )
        for at, (prompt, temperature) in enumerate(
            zip(prompts(vocab), temperatures, strict=False)
        )
    ]  # fmt: skip
    requests.append(Request(prompts(vocab)[-1], max_tokens=30, temperature=0.8))
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    assert [request.error for request in requests] == [None] * len(requests)
    return {request.prompt: tuple(request.output_ids) for request in requests}


def long_guide(seed, vocab):
    """A guide of a toy grammar whose texts are long."""
    grammar = ToyGrammar(seed, vocab, {5}, counts=(1, 2, 3, 5, 9, 9))
    grammar.length = 28
    return ToyGuide(grammar)


def assert_guided_drafts(make, vocab, acceptance=0.7):
    """Compare outputs of grammars with and without drafts.

    make: (speculates, drafter) -> engine. Returns the most drafts of a guided row that
    one step has verified, and how many there were in all.
    """
    plain = guided_texts(make(False, None), vocab)
    engine = make(True, SyntheticDrafter(plain, acceptance))
    counts, scheduler = [], engine.core.scheduler
    plan = scheduler.plan

    def recording():
        planned = plan()
        for chunk in planned.chunks:
            if chunk.request.guide is not None and chunk.drafts is not None:
                counts.append(chunk.stop - chunk.start - 1)
        return planned

    scheduler.plan = recording
    assert guided_texts(engine, vocab) == plain
    return max(counts), sum(counts)
