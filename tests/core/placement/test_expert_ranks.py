"""Experts owned by ranks: texts of one device, what a rank loads, planted faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mixture_answers
from depth import mostly_full
from inl import EngineConfig
from inl.backend.collectives import EXPERT
from inl.dtypes import wrap
from inl.errors import DeviceError, RunnerError, WeightMismatch
from inl.executor.model_loader import open_model
from inl.placement import ranks
from inl.runners.startup import start
from inl.spec.message import READ, WRITE, transfer_frame
from inl.testing.play import admission, one_step
from mixture_answers import answers, check_expert_reads, exact, served
from rank_engines import runner_over

CONFIG = EngineConfig(backend="reference", dtype="float32", **mixture_answers.OPTIONS)
HF, TENSORS = mixture_answers.made()


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return open_model(mixture_answers.write(folder, HF, TENSORS))


@pytest.fixture(scope="module")
def expected(language):
    return answers(runner_over(language, 1, CONFIG), language)


@pytest.mark.parametrize("sizes", mostly_full([(2, 2), (1, 2), (1, 4)]), ids=str)
def test_ranks_answer_as_one_device(language, expected, sizes):
    tensor, experts = sizes
    runner = runner_over(language, tensor, CONFIG, experts=experts)
    assert answers(runner, language) == expected
    requests, _ = served(runner)
    for request in requests:
        assert request.output_ids == exact(HF, TENSORS, request)


def test_stages_may_divide_their_experts(language, expected):
    config = replace(CONFIG, max_adapters=None)
    runner = runner_over(language, 1, config, 2, experts=2)
    found = answers(runner)
    assert found == {kind: expected[kind] for kind in found}


def test_blocks_are_those_of_one_device(language):
    """Ranks that share experts cache the same heads; those along tensor divide them."""
    config = replace(CONFIG, max_adapters=None)
    one, many = (
        runner_over(language, tensor, config, experts=experts)
        for tensor, experts in ((1, 1), (2, 2))
    )
    assert many.cache_layout == one.cache_layout
    ids = [*range(3, 23)]
    parts = []
    for runner in (one, many):
        runner.submit(admission(runner.limits, 1, [1, 2, 3, 4]))
        runner.submit(one_step(runner.limits, [(1, ids)], step=1, decoding=0))
        runner.collect()
        runner.submit(transfer_frame(READ, 0, [1, 2]))
        parts.append(runner.read()["cells"].data)
    assert np.abs(parts[0] - parts[1]).max() < 1e-5 < np.abs(parts[0]).max()
    many.write(transfer_frame(WRITE, 0, [4, 3]), {"cells": wrap(parts[0])})
    many.submit(transfer_frame(READ, 0, [4, 3]))
    assert np.array_equal(many.read()["cells"].data, parts[0])


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_experts_are_divided(language, kind):
    config = replace(CONFIG, max_adapters=None, quantize=kind)
    texts = []
    for experts in (1, 2):
        requests, _ = served(runner_over(language, 1, config, experts=experts))
        texts.append([request.output_ids for request in requests])
    assert texts[0] == texts[1]


def test_a_rank_reads_its_own_experts_only():
    check_expert_reads(HF, TENSORS, replace(CONFIG, max_adapters=None), experts=2)


def test_a_number_of_ranks_that_does_not_divide_is_refused(language):
    sentence = r"axis 0: found 8 entries; accepted: a multiple of 3, the number of"
    with pytest.raises(WeightMismatch, match=sentence):
        runner_over(language, 1, CONFIG, experts=3)


def test_devices_of_several_kinds_are_refused(language):
    placement = "expert=2,devices=reference+cpu"
    config = replace(CONFIG, placement=placement, max_adapters=None)
    with pytest.raises(DeviceError, match="found devices of several kinds, whose"):
        start(language, config)


def unsummed(collectives):
    """The sum over experts is left out."""
    real = collectives.all_reduce
    collectives.all_reduce = lambda x, axis: x if axis == EXPERT else real(x, axis)
    return collectives


def shifted(monkeypatch):
    """Every rank computes the experts after its own."""
    real = ranks._with_own_ids

    def wrong(spec, args, rank):
        given = list(real(spec, args, rank))
        given[spec.parameters.index("ids")] += np.int32(1)
        return tuple(given)

    monkeypatch.setattr(ranks, "_with_own_ids", wrong)


def test_a_sum_that_is_left_out_is_found(language):
    runner = runner_over(language, 1, CONFIG, experts=2, collectives=unsummed)
    with pytest.raises(RunnerError, match=r"rank \d of 2 failed: .* sampled"):
        served(runner)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_experts_of_another_offset_are_found(language, is_wrong, monkeypatch):
    if is_wrong:
        shifted(monkeypatch)
    requests, _ = served(runner_over(language, 1, CONFIG, experts=2))
    right = all(each.output_ids == exact(HF, TENSORS, each) for each in requests)
    assert right != is_wrong
