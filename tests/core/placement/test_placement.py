"""Placements: read, written, refused by a sentence; ranks as positions in them."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from inl import EngineConfig
from inl.backend.collectives import AXES, Rank
from inl.errors import (
    BackendUnavailable,
    DeviceError,
    ProtocolError,
    RequestError,
    RunnerError,
)
from inl.placement.placement import Placement, parse_placement
from inl.protocol.wire_fields import sent
from inl.runners.rank_startup import rank_devices, read_rank
from inl.runners.startup import start

AXIS_WORDS = "placement: found .*accepted: AXIS=SIZE"


@pytest.mark.parametrize(
    "text",
    ["tensor=2", "pipeline=2,tensor=4", "data=2,expert=8", "tensor=1",
     "tensor=2,devices=cuda:0+cuda:3"],
)  # fmt: skip
def test_a_placement_is_printed_as_it_is_read(text):
    assert str(parse_placement(text)) == text


def test_axes_have_one_order():
    assert str(parse_placement(" tensor = 4, data=2 ")) == "data=2,tensor=4"
    assert parse_placement("tensor=4,data=2").sizes == (2, 1, 4, 1)
    assert parse_placement("tensor=4,data=2").count == 8
    assert parse_placement("pipeline=1,tensor=2").axes == (("tensor", 2),)


@pytest.mark.parametrize(
    "text",
    ["", "tensor", "rows=2", "tensor=0", "tensor=2,tensor=2", "data=x", 3, None,
     "tensor=-1", "tensor=10000", "tensor=²", "devices=", "tensor=2,devices=a++b"],
)  # fmt: skip
def test_what_is_no_placement_is_refused(text):
    with pytest.raises(RequestError, match=AXIS_WORDS):
        parse_placement(text)


def test_devices_are_as_many_as_the_sizes_say():
    words = r"placement tensor=4,devices=.*: found 2 devices, accepted: 4"
    with pytest.raises(RequestError, match=words):
        parse_placement("tensor=4,devices=cpu:0+cpu:1")
    with pytest.raises(RequestError, match="placement: found tensor=True"):
        Placement(tensor=True)


def test_one_option_divides_a_model():
    for one in (
        EngineConfig(placement="tensor=2"), EngineConfig(tensor_parallel=2),
        EngineConfig(mesh="tensor=2"), EngineConfig(placement=Placement(tensor=2)),
    ):  # fmt: skip
        assert one.division == Placement(tensor=2)
    assert EngineConfig().division == Placement()
    for two, name in (
        ({"placement": "tensor=2", "tensor_parallel": 2}, "tensor_parallel"),
        ({"mesh": "tensor=2", "tensor_parallel": 2}, "tensor_parallel"),
        ({"mesh": "tensor=2", "placement": "tensor=2"}, "mesh"),
    ):
        with pytest.raises(RequestError, match=f"EngineConfig.{name}: found"):
            EngineConfig(**two)
    with pytest.raises(RequestError, match="mesh: found 'rows=2', accepted: AXIS"):
        EngineConfig(mesh="rows=2")
    with pytest.raises(RequestError, match=r"EngineConfig\.placement: found .*eagle"):
        EngineConfig(placement="tensor=2", speculation="eagle", draft_model="m")


def test_ranks_use_the_devices_of_the_placement():
    config = EngineConfig(
        backend="reference", placement="tensor=2,devices=reference:0+cpu:0"
    )
    assert rank_devices(config)[1] == ["reference:0", "cpu:0"]
    with pytest.raises(DeviceError):
        rank_devices(
            EngineConfig(backend="reference", placement="tensor=2,devices=?+cpu")
        )


def test_axes_that_ranks_do_not_divide_are_refused_before_a_start():
    config = EngineConfig(backend="reference", placement="data=2,pipeline=2")
    with pytest.raises(RequestError, match="found data=2 with pipeline=2; accepted"):
        start(SimpleNamespace(encoder=None), config)
    config = EngineConfig(backend="reference", placement="data=2", decode_steps=4)
    with pytest.raises(RequestError, match="decode_steps: found 4 with data=2"):
        start(SimpleNamespace(encoder=None), config)
    config = EngineConfig(backend="reference", placement="pipeline=2,hosts=2")
    with pytest.raises(BackendUnavailable, match="found pipeline=2; models are"):
        start(SimpleNamespace(encoder=None), config)


def test_positions_are_those_of_a_grid():
    sizes = (2, 3, 2, 2)
    axes = tuple(zip(AXES, sizes, strict=True))
    ranks = int(np.prod(sizes))
    grid = np.arange(ranks).reshape(sizes)
    for position in itertools.product(*map(range, sizes)):
        rank = Rank(int(grid[position]), ranks, axes=axes)
        assert tuple(map(rank.position, AXES)) == position
        for at, axis in enumerate(AXES):
            line = list(position)
            line[at] = slice(None)
            assert rank.peers(axis) == tuple(grid[tuple(line)])


def test_ranks_without_axes_are_along_tensor():
    rank = Rank(2, 4)
    assert (rank.position("tensor"), rank.size("tensor")) == (2, 4)
    assert rank.peers("pipeline") == (2,)
    for axes in (("tensor", 2),), (("rows", 4),), (("tensor", 2), ("tensor", 2)):
        with pytest.raises(RunnerError, match="found axes"):
            assert Rank(0, 4, axes=axes).grid


def test_ranks_keep_their_fields_on_the_wire():
    rank = Rank(3, 4, "[::1]:9", 5.0, (("pipeline", 2), ("tensor", 2)), "ab")
    assert read_rank(json.loads(json.dumps(sent(rank)))) == rank
    # What has its default is not sent: an older version does not know it.
    assert sent(Rank(0, 2, "h:1")) == {"number": 0, "ranks": 2, "address": "h:1"}
    assert read_rank({"number": 0, "ranks": 2}) == Rank(0, 2)


@pytest.mark.parametrize(
    "changed",
    [{"color": 1}, {"number": 4}, {"ranks": None}, {"seconds": 0}, {"address": 7},
     {"seconds": float("inf")}, {"axes": [["rows", 4]]}, {"axes": 3},
     {"axes": [["tensor", 3]]}, {"secret": 1}, {"number": True}],
    ids=str,
)  # fmt: skip
def test_ranks_that_are_not_understood_are_refused(changed):
    fields = sent(Rank(1, 4, "h:1")) | changed
    with pytest.raises(ProtocolError, match="OPEN: rank: found"):
        read_rank(fields)
    with pytest.raises(ProtocolError, match="found no number"):
        read_rank({"ranks": 2})
