"""docs/contract.md equals its generator's output, and its shapes are those of steps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from inl.backend import bandwidth, base, tunable, weight_cache
from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.engine.core import EngineCore
from inl.errors import NoKernel
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.ops.step import empty_tables, make_step
from inl.placement import mesh
from inl.plugin import FEATURES, simple_backend
from inl.scheduling.request import Request
from inl.spec.cache import Cache, State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.message import step_frame
from inl.spec.step import PARAMS, TOP, Bucket, Scores, Step, Tables
from inl.testing.contract_page import CAPABILITIES, contract_page
from inl.testing.source_fields import fields_of
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama

PAGE = Path(__file__).parents[3] / "docs" / "contract.md"
BUCKET = Bucket(8, 3, 2)
SIZES = {
    "T": 8, "R": 3, "W": 2, "S": 6, "G": 2, "B": 6, "V": 11, "N": TOP, "slots": 5,
    "PARAMS": PARAMS, "len": len,
}  # fmt: skip


def test_the_page_is_current():
    assert PAGE.read_text() == contract_page(), (
        "write it again: python -m inl.testing.contract_page > docs/contract.md"
    )


def documented(cls):
    """Field -> shape that its docstring begins with."""
    shapes = {}
    for field in fields_of(cls):
        if found := re.match(r"\[(.*?)\](?= |\.)", field.doc):
            shapes[field.name] = eval(f"({found[1]},)", dict(SIZES))
    return shapes


def test_steps_and_tables_have_the_documented_shapes_and_dtypes():
    tables = empty_tables(groups=2, slots=5, max_blocks_per_seq=6, vocab=11)
    frame = step_frame(BUCKET, (), step=0, groups=2, block_size=4, decode_rows=0)
    step, after = make_step.body(frame, tables, bucket=BUCKET, block_size=4)
    shapes = documented(Step)
    assert set(shapes) == set(Step._fields) - {"plan"}
    for name, shape in shapes.items():
        array = getattr(step, name)
        assert (np.shape(array), array.dtype) == (shape, np.int32), name
    shapes, docs = documented(Tables), {f.name: f.doc for f in fields_of(Tables)}
    assert set(shapes) == set(Tables._fields)
    for name, shape in shapes.items():
        array = getattr(after, name)
        wanted = np.float32 if "float32" in docs[name] else np.int32
        assert (array.shape, array.dtype) == (shape, wanted), name


def test_every_value_has_a_documented_meaning():
    for cls in (Bucket, Step, Tables, Scores, Limits, Cache, Kernel):
        unnamed = {"op", "name"} if cls is Kernel else set()
        empty = {field.name for field in fields_of(cls) if not field.doc}
        assert empty <= unnamed, cls
    assert {field.name for field in fields_of(State)} == set(State._fields)


def kernels_of(names):
    return tuple(
        Kernel(name, "body", body_kernel(catalog()[name], "float32")) for name in names
    )


@pytest.fixture
def listed():
    """Primitives that the page lists for a Llama."""
    found = re.search(r"A Llama needs (\d+) primitives: (.*?)\.\n", PAGE.read_text())
    names = re.findall(r"`(\w+)`", found[2])
    assert len(names) == int(found[1])
    return names


def runner_with(names):
    backend = simple_backend(
        tensor=lambda host: np.array(widen(host)), numpy=wrap,
        kernels=lambda: kernels_of(names), traits=Traits(block_size=4),
    )  # fmt: skip
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(0)))
    limits = Limits(5, (20,), 4, 6, 96)
    return local_runner(backend(Device("few:0")), MODEL, files, limits)


def test_a_llama_runs_on_the_listed_primitives(listed):
    core = EngineCore(runner_with(listed))
    fields = {"allowed_token_ids": range(9)}, {"temperature": 0.7, "top_p": 0.9}, {}
    requests = [Request([1, 2, 3], max_tokens=3, **more) for more in fields]
    for request in requests:
        core.add(request)
    while core.has_work:
        assert [event.error for event in core.step() if event.error] == []
    assert [len(request.output_ids) for request in requests] == [3, 3, 3]


def resolve_all(names):
    runner_with(names).executor.ops(Bucket(16, 2, sampler="sample_filtered"))


def test_a_llama_needs_each_listed_primitive(listed):
    for name in listed:
        others = [each for each in listed if each != name]
        with pytest.raises(NoKernel, match=f"no kernel for {name} "):
            resolve_all(others)


def test_what_a_minimal_backend_needs_is_one_short_section():
    minimal = PAGE.read_text().partition("## The promise")[0]
    assert len(minimal.splitlines()) < 75
    named = [cls.__name__ for classes in CAPABILITIES.values() for cls in classes]
    assert [name for name in named if name in minimal] == []


def test_every_capability_and_value_of_backends_is_on_the_page():
    modules = base, mesh, bandwidth, tunable, weight_cache
    classes = {
        name
        for module in modules
        for name, each in vars(module).items()
        if isinstance(each, type) and each.__module__ == module.__name__
    }
    known = {"Backend", "MeasuredBandwidth", "FileIdentity"}
    headings = set(re.findall(r"### (\w+)\n", PAGE.read_text()))
    assert classes - headings - known == set()


def test_every_feature_is_on_the_page():
    section = PAGE.read_text().partition("## Features")[2].partition("##")[0]
    assert set(re.findall(r"\| `(\w+)` \|", section)) == set(FEATURES)


def test_the_page_counts_the_ops():
    primitives = sum(not op.composite for op in catalog().values())
    assert f"{len(catalog())} ops: {primitives} primitives" in PAGE.read_text()
