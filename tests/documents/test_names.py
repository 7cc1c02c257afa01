"""The table of docs/migrating.md has every name of the documents, in its true state."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from dotted_names import resolve
from inl.engine.options import GenerationOptions
from inl.errors import KernelError, RequestError
from inl.kernels import KernelConfig, tpu_kernel

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "documents"
OUTSIDE = {"jax", "jnp", "torch", "time", "Optional", "logger", "xla"}
"""What the blocks use of other libraries, without importing it."""


def root_of(node):
    """The first name of a dotted expression, if it has one."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def given_by_user(tree):
    """Names that a document's blocks assign, define or take from other libraries."""
    names = {*OUTSIDE, "devices", "my_tpu_kernel", "PartitionSpec", "array"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef):
            names |= {node.name, *(each.arg for each in node.args.args)}
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith("inl"):
            names |= {alias.name for alias in node.names}
    imported = {name for name in names_imported(tree) if "." not in name}
    return names - imported


def names_imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("inl"):
            yield node.module
            yield from (alias.name for alias in node.names)


OBJECTS = {"engine", "tpu", "tpu_device", "model", "prof", "nx"}
"""Objects of INL that the blocks make: their attributes are names of INL."""


def names_shown(tree):
    """Every name and keyword of INL in the blocks of a document."""
    theirs = given_by_user(tree) - OBJECTS
    yield from names_imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root_of(node) not in theirs:
            yield node.attr
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            root = root_of(node.func)
            if root not in theirs | OBJECTS and not hasattr(builtins, root):
                yield name
            if root not in theirs:
                yield from (f"{name}({each.arg}=)" for each in node.keywords)
        elif isinstance(node, ast.FunctionDef):
            yield from {*map(root_of, node.decorator_list)} - theirs
        elif isinstance(node, ast.ExceptHandler) and root_of(node.type):
            yield root_of(node.type)


def documented():
    """Names of all documents: of their Python blocks, and of the rest of their text."""
    found = {*PROSE}
    for path in DATA.glob("*.txt"):
        text = path.read_text("utf-8").replace("(...)", "(*operands)")
        shown = set(names_shown(ast.parse(text)))
        found |= {n for n in shown if not hasattr(builtins, n)}
    return found - {"print", "print(end=)", "print(flush=)", "xla_client"}


PROSE = (DATA / "names.lst").read_text("utf-8").splitlines()
"""Names in the text, the trees of files and the other languages of the documents."""


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


def rows():
    page = (ROOT / "docs" / "migrating.md").read_text("utf-8")
    found = re.findall(r"^\| (.+?) \| ?(.*?) \| (.+?) \|$", page, re.M)
    return [row for row in found if row[0] != "name"]


def listed(cell):
    """Names and keywords in the first cell: ``f(a=, b=)`` is three."""
    for span in spans(cell):
        name, _, inside = span.partition("(")
        if "=" not in inside:
            yield span.rpartition(".")[2] if span[:1].isupper() else span
            continue
        last = name.rpartition(".")[2]
        yield last
        yield from (f"{last}({each}=)" for each in re.findall(r"(\w+)=", inside))


def test_the_table_has_every_name_and_no_other():
    table = [name for row in rows() for name in listed(row[0])]
    assert len(table) > 100
    assert sorted(set(table) - documented()) == []
    assert sorted(documented() - set(table)) == []
    assert len(table) == len(set(table)), "listed twice"


def accepted(function):
    """Keywords that a function takes; of ``**fields``, those of its dataclass."""
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names |= {field.name for field in dataclasses.fields(KernelConfig)}
        names |= {*GenerationOptions.__annotations__}
    return names


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_name_is_in_the_state_of_its_row(row):
    names, ours, state = row
    kind = re.match(r"works|differs: |refused: ", state)
    assert kind, state
    objects = [resolve(path) for path in spans(ours)]
    if kind[0] != "refused: ":
        assert objects
    if kind[0] != "works":
        return
    for name in listed(names):
        function, keyword = re.match(r"([\w. /\[\]-]+)(?:\((\w+)=\))?$", name).groups()
        plain = function.rpartition(".")[2]
        if keyword:
            assert keyword in accepted(objects[0]), name
        elif name not in PROSE and "." not in function:
            known = {getattr(each, "__name__", "") for each in objects}
            known |= {path.rpartition(".")[2] for path in spans(ours)}
            known |= {"PrecisionConfig", "HIGH"}  # JAX's, as a value of a field
            assert plain in known, name


def absent_in_clients():
    for path in (ROOT / "examples").glob("*/inl.*"):
        text = path.read_text("utf-8")
        assert "Tensor" not in text
        assert "Device::" not in text
    raise NotImplementedError("clients have no tensors")


def undefined_xla():
    exec("xla.custom_call('my_custom_op', 1, platform='tpu')", {})


def as_written(code):
    def run():
        jax = pytest.importorskip("jax")
        devices = np.array(jax.devices()[:1]).reshape(1, 1)
        exec(code, {"jax": jax, "devices": devices})

    return run


def second_host():
    from inl.plugin import make_backend

    make_backend("reference:8")


CLIENTS = (absent_in_clients, NotImplementedError, "no tensors")
REFUSED = {
    "TPU pods": (second_host, Exception, "reference:8"),
    "phynexus::Tensor": CLIENTS, "phynexus::DataType::FLOAT32": CLIENTS,
    "phynexus::Device": CLIENTS, "phynexus::DeviceType::TPU": CLIENTS,
    "Tensor::new": CLIENTS, "DataType::Float32": CLIENTS, "Device::tpu": CLIENTS,
    "jax.sharding.Mesh of 3 axes": (
        as_written("jax.sharding.Mesh(devices, ['data', 'model', 'expert'])"),
        ValueError, "axis_names",
    ),
    "jax.checkpoint module": (
        as_written("from jax.checkpoint import checkpoint"), ImportError, "jax",
    ),
    "jax.profiler.trace()": (
        as_written("jax.profiler.trace()"), TypeError, "log_dir",
    ),
    "xla.custom_call": (undefined_xla, NameError, "xla"),
}  # fmt: skip
"""Refused name -> a call, and its error."""


def test_refused_names_are_refused():
    wanted = {
        n for row in rows() if row[2].startswith("refused") for n in spans(row[0])
    }
    assert wanted == {*REFUSED}
    for name, (run, kind, message) in REFUSED.items():
        with pytest.raises(kind, match=message):
            run()
        assert name


def test_what_differs_is_refused_where_it_says_so():
    from inl.kernels import moe_dispatch
    from inl.optimizers import quantize_for_inference

    with pytest.raises(RequestError, match=r"a LanguageModel of open_model"):
        quantize_for_inference(object(), dtype="int8")
    with pytest.raises(TypeError, match="expert_weights"):
        moe_dispatch(np.ones((2, 3)), np.ones((4, 3, 3)), capacity_factor=1.0)
    with pytest.raises(KernelError, match="found use_magic, accepted: block_size"):
        tpu_kernel(use_magic=True)
