"""Searched block sizes: the installed table, the kernels that read it, ``inl tune``."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from inl.backend.tunable import Tunable
from inl.errors import RequestError
from inl.ops.moe import ExpertLinear
from inl.tune import models
from inl.tune.trials import Trials, TuningOptions
from inl_jax.pallas import (
    block_sizes,
    dense,
    experts,
    matmul,
    paged_attention,
    search_space,
)
from inl_jax.pallas.packed import Packed
from inl_tpu import tuner
from inl_tpu.backend import TpuBackend
from tpu_simulator import simulated

CHIPS = {"v5e", "v5p", "v6e", "7x"}
PARAMETERS = {
    matmul.NAME: {"rows", "outputs"},
    paged_attention.NAME: {"keys", "columns"},
    experts.NAME: {"bytes"},
    dense.NAME: {"rows", "outputs", "inputs"},
}


def test_the_installed_table():
    """Every entry is of a known chip, kernel and parameter, and no slower."""
    table = block_sizes.table()
    assert set(table) <= CHIPS
    assert {"v5e", "v6e"} <= set(table)
    for kernels in table.values():
        assert set(kernels) <= set(PARAMETERS)
        for kernel, shapes in kernels.items():
            for shape, entry in shapes.items():
                sizes = entry["sizes"]
                assert set(sizes) <= PARAMETERS[kernel], shape
                assert all(size % 128 == 0 for size in sizes.values()), shape
                if sizes and "rule us" in entry:
                    assert entry["us"] < 0.98 * entry["rule us"], shape


def test_no_chip_is_found_on_the_cpu():
    assert block_sizes.chip() == ""
    assert block_sizes.searched(matmul.NAME, "any") == {}


@pytest.fixture
def listed(monkeypatch):
    """Returns a function that makes a table of one entry, for chip v6e."""

    def put(kernel, shape, sizes):
        table = {"v6e": {kernel: {shape: {"sizes": sizes}}}}
        monkeypatch.setattr(block_sizes, "chip", lambda: "v6e")
        monkeypatch.setattr(block_sizes, "table", lambda: table)

    return put


def grids(run, *shapes):
    """Grid of each Pallas kernel of a function."""

    def found(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["grid_mapping"].grid
            for inner in jaxprs_in_params(equation.params):
                yield from found(inner)

    specs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(*leaf), shapes,
        is_leaf=lambda x: type(x) is tuple and len(x) == 2 and isinstance(x[1], str),
    )  # fmt: skip
    return list(found(jax.make_jaxpr(run)(*specs).jaxpr))


def test_products_read_the_table(listed):
    w = Packed(((4096, 2048), "int8"), ((128, 2048), "int16"))
    shapes = (((1024, 4096), "bfloat16"), w)
    # Blocks of outputs, parts of the inputs, blocks of rows.
    assert grids(lambda *args: matmul.matmul(*args), *shapes) == [(2, 1, 2)]
    name = matmul.shape_of(1024, 4096, 2048, "int8", False)
    listed(matmul.NAME, name, {"rows": 256, "outputs": 512})
    assert grids(lambda *args: matmul.matmul(*args), *shapes) == [(4, 1, 4)]
    few = (((8, 4096), "bfloat16"), w)
    assert grids(lambda *args: matmul.matmul(*args), *few) == [(4, 1, 1)]


def test_experts_read_the_table(listed):
    shapes = (
        ((4, 1, 1024), "bfloat16"), ((4, 1), "int32"),
        ExpertLinear(((8, 4096, 1024), "bfloat16")),
    )  # fmt: skip
    before = grids(lambda *args: experts.expert_linear(*args), *shapes)
    listed(experts.NAME, "1024 to 4096, bfloat16", {"bytes": 1 << 20})
    after = grids(lambda *args: experts.expert_linear(*args), *shapes)
    assert [each[0] for each in (*before, *after)] == [2, 8]


def test_attention_reads_the_table(listed):
    name = paged_attention.shape_of(4, 32, 8, 128, jnp.dtype("bfloat16"))
    listed(paged_attention.NAME, name, {"keys": 128})
    sizes = block_sizes.chosen((), paged_attention.NAME, name)
    assert paged_attention.chunk_pages(4, 32, 64, sizes) == 4
    assert paged_attention.chunk_pages(4, 32, 64, {}) == 16
    # Sizes that were measured on the machine come first.
    own = block_sizes.static({"keys": 256})
    assert block_sizes.chosen(own, paged_attention.NAME, name) == {"keys": 256}


CONFIG = {
    **models.LLAMA, "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return TuningOptions("tpu:0", str(path), "float32", ("attention",), (2,), 8)


def test_block_sizes_are_measured_and_checked(monkeypatch, options):
    """With simulated kernels in place of a TPU's."""
    for name, value in (("ROUNDS", 1), ("MIN_SECONDS", 0.0)):
        monkeypatch.setattr(tuner, name, value)
    monkeypatch.setattr(tuner.Tuner, "cache_bytes", 1)

    others = TpuBackend.offers

    def offers(backend, kind):
        if kind is Tunable:
            return tuner.Tuner(backend.place, simulated())
        return others(backend, kind)

    monkeypatch.setattr(TpuBackend, "offers", offers)
    trials = Trials(options, seed=0)
    (call,) = trials.calls
    (axis,) = trials.axes(call)
    assert axis == search_space.AXES["attention"]
    assert trials.kernel(0, {}).label == "attention/xla"
    assert trials.kernel(0, axis[0]).config == axis[0]
    assert trials.seconds(0, axis[0]) > 0
    verdict = trials.verdict(0, axis[0], seed=1)
    assert verdict.passed, str(verdict)
    assert trials.tunable.facts().plugin.startswith("inl-tpu")


def test_other_platforms_have_nothing_to_tune(options):
    with pytest.raises(RequestError, match="no tunable kernels"):
        Trials(options, seed=0)


@pytest.mark.parametrize(
    ("op", "config", "reason"),
    [
        ("attention", {"keys": 100}, "found {'keys': 100}"),
        ("rms_norm", {}, "no block sizes to tune"),
    ],
)
def test_unknown_configs_are_refused(op, config, reason):
    with pytest.raises(RequestError, match=reason):
        search_space.kernel(op, config)
