"""Copies of experts: how they are chosen, texts of one device, what each rank holds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import mixture_answers
from depth import mostly_full
from inl import EngineConfig
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.engine.expert_loads import ExpertLoads
from inl.errors import RequestError
from inl.executor.load_plan import LoadPlan
from inl.executor.model_loader import open_model
from inl.runners.startup import start
from inl.spec.op import nbytes
from inl.spec.tree import leaves
from inl.weights import expert_copies
from inl.weights.expert_copies import choose_copies, device_imbalance
from mixture_answers import answers, exact, served
from rank_engines import runner_over

HF, TENSORS = mixture_answers.made()
OPTIONS = mixture_answers.OPTIONS | {"max_adapters": None}
COUNTS = [[90, 5, 5, 5, 5, 5, 5, 5], [5, 5, 5, 40, 5, 5, 70, 5]]


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return open_model(mixture_answers.write(folder, HF, TENSORS))


def with_copies(folder, count=1, counts=COUNTS, **options):
    path = folder / "loads.json"
    path.write_text(json.dumps({"expert_loads": {"counts": counts}}))
    return EngineConfig(
        backend="reference", dtype="float32", expert_copies=f"{count}:{path}",
        **(OPTIONS | options),
    )  # fmt: skip


SIZES = [{"experts": 2}, {"rows": 2}, {"experts": 4}, {"rows": 2, "experts": 2}]


@pytest.mark.parametrize("sizes", mostly_full(SIZES, quick=1), ids=str)
def test_ranks_answer_as_one_device(language, sizes, tmp_path):
    config = with_copies(tmp_path, 2)
    runner = runner_over(language, 1, config, **sizes)
    ranks = sizes.get("experts", 1) * sizes.get("rows", 1)
    for rank in runner.runners:
        held = {w.layer.mlp.experts.gate.shape[0] for w in rank.loaded.weights.layers}
        assert held == {8 // ranks + 2}
    found = answers(runner)
    alone = answers(runner_over(language, 1, replace(config, expert_copies=None)))
    assert found == alone
    requests, _ = served(runner)
    for request in requests:
        assert request.output_ids == exact(HF, TENSORS, request)


def other_expert(real):
    """A copy is taken for the one of the next expert."""

    def table(order, shape):
        return np.roll(real(order, shape), 1, 0)

    return table


def other_place(real):
    """Tokens go to the place behind."""

    def table(order, shape):
        return (real(order, shape) + 1) % len(order)

    return table


def turned(real):
    """Each place has the expert of the next one."""

    def ordered(param, order):
        return real(param, (*order[1:], order[0]))

    return ordered


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (None, None),
        ("_table", other_expert),
        ("_table", other_place),
        ("_ordered", turned),
    ],
)
def test_planted_faults_are_found(language, name, fault, tmp_path, monkeypatch):
    if name:
        monkeypatch.setattr(expert_copies, name, fault(getattr(expert_copies, name)))
    config = with_copies(tmp_path, counts=[[1, 1, 1, 1, 1, 1, 1, 90]] * 2)
    requests, _ = served(runner_over(language, 1, config, experts=2))
    right = all(each.output_ids == exact(HF, TENSORS, each) for each in requests)
    assert right == (fault is None)


def test_copies_divide_the_tokens_of_the_busiest_experts():
    loads = np.array([90.0, 5, 5, 5, 5, 5, 5, 5])
    order = choose_copies(loads, 4, 1)
    assert [order.count(expert) for expert in range(8)] == [4, 1, 2, 1, 1, 1, 1, 1]
    alone = tuple(range(8))
    assert device_imbalance(loads, alone, 4) == pytest.approx(95 / 31.25)
    assert device_imbalance(loads, order, 4) < 1.1
    for device in range(4):
        held = order[3 * device : 3 * device + 3]
        assert len({*held}) == 3
        assert {2 * device, 2 * device + 1} <= {*held}


def test_devices_with_copies_are_reported(tmp_path):
    loads = ExpertLoads()
    loads.add(np.array(COUNTS, np.int32))
    found = [
        loads.device_imbalance(with_copies(tmp_path, placement=placement))
        for placement in ("expert=2", None, "expert=2,tensor=2")
    ]
    alone = loads.device_imbalance(EngineConfig(placement="data=2"))
    assert alone == pytest.approx([105 / 62.5, 85 / 70])
    assert found[1] == []
    assert found[0] == found[2]
    assert max(found[0]) < 1.1


def test_random_copies_are_balanced_better(seeded):
    for _ in range(20):
        loads = seeded.pareto(1.0, 32) * 100
        order = choose_copies(loads, 4, 2)
        assert {*order} == {*range(32)}
        before = device_imbalance(loads, tuple(range(32)), 4)
        assert device_imbalance(loads, order, 4) <= before + 1e-9


@pytest.fixture
def seeded():
    return np.random.default_rng(5)


def test_a_plan_has_the_bytes_of_copies(language, tmp_path):
    backend = ReferenceBackend(Device("reference"), dtype="float32")

    def size(config):
        groups = LoadPlan.of(language, backend, config).unloaded.groups
        return sum(nbytes(each.specs("float32")) for each in leaves(groups))

    config = with_copies(tmp_path, 2, placement="expert=2")
    once = size(replace(config, expert_copies=None))
    expert, table = 3 * 32 * 48 * 4, 8 * 15 * 4
    assert size(config) - once == 2 * (2 * expert + table)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"count": 5}, "found 5 for 8 experts on 2 devices; accepted: 1 to 4"),
        ({"counts": [[1.0] * 8]}, "found loads of 1 layers; the model has 2"),
        ({"counts": [[1.0] * 6] * 2}, "found loads of 6 experts; the model has 8"),
        ({"counts": [[1, -1]]}, r"found counts of shape \[1, 2\]"),
        ({"counts": "many"}, "accepted: a JSON object with"),
        (
            {"placement": "pipeline=2"},
            "expert_copies: .* None with a pipeline",
        ),
        ({"placement": "tensor=2"}, "with experts on one device"),
    ],
)
def test_refusals(language, options, sentence, tmp_path):
    with pytest.raises(RequestError, match=sentence):
        start(language, with_copies(tmp_path, **({"placement": "expert=2"} | options)))


@pytest.mark.parametrize("text", ["2", "x:f", "0x2:f", "2:", 7])
def test_other_options_are_refused(text):
    with pytest.raises(RequestError, match="accepted: None or N:FILE"):
        EngineConfig(expert_copies=text)
