"""Sizes that ranks do not divide: tokens and log-probabilities as on one rank."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from inl import EngineConfig
from inl.checkpoints.blocks.encode import encode
from inl.errors import WeightMismatch
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.placement.sharding import divisible
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from lora_files import LoraFiles
from rank_engines import over

VOCAB = 97
"""A prime: no number of ranks divides it."""
CONFIG = EngineConfig(
    backend="reference", dtype="float64", context=64, max_batch=4,
)  # fmt: skip
PROMPTS = [[5, 17, 80, 3, 44, 9], [96], [7, 7, 12, 90, 33] * 3]
OPTIONS = [
    {},
    {"temperature": 1.0, "seed": 3, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 4, "logit_bias": {96: 6.0, 95: 5.0}},
    {"allowed_token_ids": [1, 95, 96], "presence_penalty": 0.5},
]


def llama(seed=0, **sizes):
    return language_of(*tiny_llama(np.random.default_rng(seed), vocab=VOCAB, **sizes))


def language_of(config, tensors):
    files = MemoryCheckpoint(config, tensors)
    return LanguageModel(MODEL, MODEL.config(config), files)


def answers(engine, **options):
    """Tokens, and log-probabilities of the most likely ones, of each request."""
    handles = [
        engine.submit(prompt, max_tokens=8, logprobs=20, **each, **options)
        for each in OPTIONS
        for prompt in PROMPTS
    ]
    while not all(handle.completed for handle in handles):
        engine.step()
    done = [handle.completion() for handle in handles]
    tops = [dict(each.top) for one in done for each in one.logprobs]
    return [one.token_ids for one in done], tops


def check_equal(found, expected):
    assert found[0] == expected[0]
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys()
        for token, value in theirs.items():
            assert abs(mine[token] - value) < 1e-4, token


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stored", ["plain", "q8_0", "q4_1"])
def test_a_vocabulary_that_ranks_do_not_divide(ranks, tied, stored):
    config, tensors = tiny_llama(
        np.random.default_rng(1), vocab=VOCAB, hidden=64, tied=tied
    )
    if stored != "plain":
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        tensors = {**tensors, name: encode(np.float32(tensors[name]), stored)}
    language = language_of(config, tensors)
    with over(language, 1, CONFIG) as engine:
        expected = answers(engine)
    assert any(96 in ids for ids in expected[0]), "the last token never occurs"
    with over(language, ranks, CONFIG) as engine:
        assert engine.runner.limits.vocab == VOCAB
        check_equal(answers(engine), expected)


def test_hidden_states_of_more_lanes_than_tokens_are_whole():
    language = llama(hidden=128)
    found = []
    for ranks in (1, 4):
        with over(language, ranks, CONFIG) as engine:
            found.append(np.array(engine.embed(PROMPTS)))
    assert found[0].shape == (3, 128)
    assert np.abs(found[0] - found[1]).max() < 1e-6


@pytest.mark.parametrize(("kv_heads", "ranks"), [(2, 4), (1, 4), (4, 8)])
def test_fewer_key_value_heads_than_ranks(kv_heads, ranks):
    language = llama(kv_heads=kv_heads, bias=True)
    with over(language, 1, CONFIG) as engine:
        expected = answers(engine)
    with over(language, ranks, CONFIG) as engine:
        check_equal(answers(engine), expected)


def test_adapters_over_repeated_heads_and_a_padded_vocabulary(tmp_path):
    config, tensors = tiny_llama(
        np.random.default_rng(2), vocab=VOCAB, kv_heads=2, tied=True
    )
    LoraFiles(tensors, seed=5).write(tmp_path / "one")
    language = language_of(config, tensors)
    settings = dataclasses.replace(CONFIG, max_adapters=1, max_adapter_rank=4)
    found = []
    for ranks in (1, 4):
        with over(language, ranks, settings) as engine:
            plain = answers(engine)
            engine.load_adapter("one", tmp_path / "one")
            found.append(answers(engine, adapter="one"))
            assert found[-1][0] != plain[0]
    check_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ({"inner": 90}, 4, r"mlp\.gate_proj\.weight: axis 0: found 90 .*of 4"),
        ({}, 3, r"q_proj\.weight: axis 0: found 64 .*multiple of 3"),
        ({"heads": 6, "kv_heads": 2}, 4, "found 6 query heads for 4 ranks"),
        ({"heads": 6, "kv_heads": 3}, 2, "found 3 key-value heads for 2 ranks"),
    ],
)
def test_other_sizes_are_refused_by_name(sizes, ranks, message):
    with pytest.raises(WeightMismatch, match=message):
        over(llama(**sizes), ranks, CONFIG).close()


def test_more_ranks_than_tokens():
    config, _ = tiny_llama(np.random.default_rng(0), vocab=3)
    shaped = MODEL.config(config)
    head = divisible(MODEL, shaped, 8).weights(shaped).head.params["weight"]
    assert head.shape == (8, 48)
    assert head.row_slices.rows == 3
    rows = [row for span in head.row_slices.spans for row in range(*span)]
    assert rows == [0, 1, 2, 2, 2, 2, 2, 2]
