"""The tokens that HashRunner must return, computed from token ids alone."""

from __future__ import annotations

import hashlib
import struct
from functools import cache

WORDS = 1 << 64


@cache
def scrambled(number):
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORDS
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WORDS
    return number ^ number >> 31


def noise(seed, position):
    state = scrambled(seed % WORDS) + (position + 1) * 0x9E3779B97F4A7C15
    number = (scrambled(state % WORDS) >> 40) / 2**24
    return scrambled(1 + int.from_bytes(struct.pack("<f", number), "little"))


NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def bits(value):
    return int.from_bytes(struct.pack("<f", value), "little")


def special(request, answer):
    """The noise of parameters, biases and token counts."""
    numbers = [getattr(request, name) for name in NEUTRAL]
    pairs = zip(numbers, NEUTRAL.values(), strict=True)
    changed = [mine != other for mine, other in pairs]
    penalized, filtered = any(changed[4:]), changed[0] and any(changed[1:4])
    bias = {token: value for token, value in request.logit_bias.items() if value}
    if not (penalized or filtered or bias):
        return 0
    pairs = [(1 + place, bits(number)) for place, number in enumerate(numbers)]
    pairs += [(2**31 + token, bits(value)) for token, value in bias.items()]
    if penalized:
        for token in {*request.prompt, *answer}:
            count = 2 * answer.count(token) + (token in request.prompt)
            pairs.append((256 + token, count))
    return sum(scrambled((tag << 32) + number) for tag, number in pairs) % WORDS


def value_of_adapter(digest):
    """0 without an adapter, else 31 bits of its digest."""
    return (
        0
        if not digest
        else int(hashlib.sha256(digest.encode()).hexdigest()[:8], 16) // 2
    )


def expected(request, limits, context, stops, recurrent=False):
    """The output that HashRunner documents, computed without blocks, slots or steps."""
    grammar = request.guide and request.guide.grammar
    adapter = value_of_adapter(request.adapter_digest)
    totals, ids = [[0] for _ in limits.blocks], list(request.prompt)
    windows = limits.windows or (None,) * limits.groups
    state = 0
    for at in range(min(len(ids) + request.max_tokens, context)):
        if at >= request.prompt_tokens:
            extra = noise(request.seed, at) if request.temperature else 0
            extra ^= special(request, ids[request.prompt_tokens :])
            total = sum(sum(last) for last in totals) + state
            number = scrambled((total + at) % WORDS ^ extra)
            allowed = request.allowed_token_ids or range(limits.vocab)
            if grammar is not None:
                allowed = grammar.allowed(ids[request.prompt_tokens :])
            ids.append(allowed[number % len(allowed)])
            if ids[at] in stops:
                return ids[request.prompt_tokens :], "stop"
            if grammar is not None and grammar.is_complete(
                ids[request.prompt_tokens :]
            ):
                return ids[request.prompt_tokens :], "stop"
        add(totals, windows, at, (adapter << 32) + ids[at] + 1)
        if recurrent:
            state = scrambled((state + (adapter << 32) + ids[at] + 1) % WORDS)
    return ids[request.prompt_tokens :], "length"


def expected_hidden(request, limits, recurrent=False):
    """The hidden state that HashRunner documents, of the whole prompt."""
    adapter = value_of_adapter(request.adapter_digest)
    totals, state = [[0] for _ in limits.blocks], 0
    windows = limits.windows or (None,) * limits.groups
    for at, token in enumerate(request.prompt):
        add(totals, windows, at, (adapter << 32) + token + 1)
        if recurrent:
            state = scrambled((state + (adapter << 32) + token + 1) % WORDS)
    total = (sum(map(sum, totals)) + state + request.prompt_tokens) % WORDS
    return [scrambled((total + at) % WORDS) % 2**24 + 1 for at in range(8)]


def add(totals, windows, at, value):
    """Add a token at position ``at`` to the sums of every group."""
    for group, (window, last) in enumerate(zip(windows, totals, strict=True)):
        weight, mine = scrambled((group << 32) + at) | 1, value
        if window is None:
            last[0] += value * weight
            continue
        if len(last) == window:
            del last[0]
        mine = scrambled((value + sum(last)) % WORDS)
        last.append(mine * weight)
