"""Ranks that divide the rows of a step: texts of one device, planted faults."""

from __future__ import annotations

import pytest

import mixture_answers
from depth import mostly_full
from inl import EngineConfig
from inl.executor.model_loader import open_model
from mixture_answers import answers, exact, served
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


@pytest.mark.parametrize(
    "sizes", mostly_full([(2, 1, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2)]), ids=str
)
def test_ranks_answer_as_one_device(language, expected, sizes):
    rows, tensor, experts = sizes
    runner = runner_over(language, tensor, CONFIG, experts=experts, rows=rows)
    assert answers(runner, language) == expected
    requests, _ = served(runner)
    for request in requests:
        assert request.output_ids == exact(HF, TENSORS, request)
