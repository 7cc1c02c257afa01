"""Search space of kernel configurations: candidates, refusals, correctness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import PLACE

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.errors import RequestError
from inl.ops import catalog
from inl.spec.tolerance import judge
from inl.tune.models import calls, plan_decoding

# isort: split
from inl_torch.triton import search_space
from inl_torch.triton.tuning import Tile, Tuning

TUNING = Tuning(max_rows=8)
TILE = {"rows": 2, "columns": 64, "warps": 1}
CONFIGS = {
    "norm_qkv": {f"norm.{name}": value for name, value in TILE.items()},
    "norm_mlp": {
        f"{kind}.{name}": value
        for kind in ("gated", "plain")
        for name, value in TILE.items()
    },
    "linear": {f"plain.{name}": value for name, value in TILE.items()},
    "rope_attend": {
        "attend.keys": 16, "attend.waves": 8, "attend.warps": 2, "attend.stages": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def calls_of():
    """Calls of the shape "smollm2" with one row, eight, and more."""
    backend = ReferenceBackend(Device("reference"))
    return {
        (call.spec.name, rows): call
        for rows in (1, 8, 9)
        for call in calls(plan_decoding(backend, "smollm2", "bfloat16", rows))
    }


def space(calls_of, op, rows):
    call = calls_of[op, rows]
    return search_space.search_space(op, call.args, call.attrs, TUNING)


def kinds(found):
    return [{name.partition(".")[0] for name in axis[0]} for axis in found]


def test_each_kind_of_kernel_has_a_list(calls_of):
    assert kinds(space(calls_of, "norm_mlp", 1)) == [{"gated"}, {"plain"}]
    assert kinds(space(calls_of, "rope_attend", 1)) == [{"attend"}]
    assert kinds(space(calls_of, "linear", 1)) == [{"plain"}]
    assert kinds(space(calls_of, "norm_qkv", 8)) == [{"norm"}]
    assert space(calls_of, "rope", 1) == ()


def test_no_configurations_where_the_library_is_called(calls_of):
    assert not space(calls_of, "norm_logits", 8)  # too many outputs
    assert not space(calls_of, "norm_mlp", 9)
    assert not space(calls_of, "linear", 9)
    assert kinds(space(calls_of, "rope_attend", 9)) == [{"attend"}]


def test_every_configuration_makes_a_kernel(calls_of):
    for op, rows in (
        ("norm_mlp", 1),
        ("rope_attend", 8),
        ("linear", 8),
        ("norm_logits", 1),
    ):
        for axis in space(calls_of, op, rows):
            assert len({tuple(config.items()) for config in axis}) == len(axis)
            for config in axis:
                made = search_space.kernel(op, config, TUNING)
                assert (made.label, made.config) == (f"{op}/triton", config)


@pytest.mark.parametrize(
    ("op", "config", "message"),
    [
        ("norm_qkv", {"gated.rows": 2}, "gated.rows=2"),
        ("norm_qkv", {"norm.rows": 3}, "norm.rows=3"),
        ("norm_qkv", {"norm.rows": 128}, "norm.rows=128"),
        ("norm_qkv", {"norm.rows": 0}, "norm.rows=0"),
        ("norm_qkv", {"norm.rows": 2}, "norm lacks columns, warps"),
        ("rope_attend", {"attend.colour": 2}, "attend.colour=2"),
        ("rope", {"norm.rows": 2}, "norm.rows=2"),
    ],
)
def test_invalid_parameters_are_refused(op, config, message):
    with pytest.raises(RequestError, match=message):
        search_space.kernel(op, config, TUNING)


def test_an_override_applies_to_one_row_and_to_several():
    cut = Tuning(
        overrides={"norm": Tile(2, 64, 1)}, tiles={("norm", 8, 8): Tile(1, 16, 1)}
    )
    assert cut.tile("norm", 8, 8) == Tile(2, 64, 1)
    assert cut.tile("norm", 9, 9, 8) == Tile(2, 64, 1)
    assert cut.tile("plain", 8, 8) != Tile(2, 64, 1)


@pytest.mark.parametrize("op", CONFIGS)
def test_a_kernel_of_another_configuration_is_right(
    op, seed, on_torch, on_host, monkeypatch
):
    spec, made = catalog()[op], search_space.kernel(op, CONFIGS[op], TUNING)
    seen = []
    plain = Tuning.tile

    def tile(*args):
        seen.append(plain(*args))
        return seen[-1]

    monkeypatch.setattr(Tuning, "tile", tile)
    several = [c for c in spec.cases(np.random.default_rng(seed)) if _fits(c, op)]
    for case in several[:2]:
        *rest, w = on_torch(spec, case, "float32", PLACE)
        got = on_host(made.run(*rest, _packed(w), **case.attrs))
        verdict = judge(spec, case, "float32", got)
        assert verdict.passed, f"{op} {case.name}, seed {seed}: {verdict}"
    if op != "rope_attend":
        assert set(seen) == {Tile(**TILE)}


def _fits(case, op):
    if op == "rope_attend":
        return "decode" in case.name
    return case.args[0].shape[0] == 1


def _packed(w):
    from inl.ops.linear import QkvLinear
    from inl.ops.mlp import GatedMlp
    from inl_torch.eager.linear import StackedQkv
    from inl_torch.eager.mlp import StackedMlp

    if isinstance(w, QkvLinear):
        biased = w.q_bias is not None
        bias = torch.cat((w.q_bias, w.k_bias, w.v_bias)) if biased else None
        return StackedQkv(torch.cat((w.q, w.k, w.v)), w.k, bias)
    return StackedMlp(torch.cat((w.gate, w.up)), w.down) if type(w) is GatedMlp else w
