"""Import contracts of the rooms hold, and each of them can fail."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command as run; run()"
SOURCES = (
    "core/src",
    "libs/inl-jax/src",
    "libs/inl-onnx/src",
    "libs/inl-toolkit/src",
    "libs/inl-torch/src",
    "plugins/inl-cpu/src",
    "plugins/inl-cuda/src",
    "plugins/inl-intel/src",
    "plugins/inl-mooncake/src",
    "plugins/inl-nixl/src",
    "plugins/inl-ray/src",
    "plugins/inl-rocm/src",
    "plugins/inl-directml/src",
    "plugins/inl-tpu/src",
)


def lint(folder):
    paths = os.pathsep.join(str(folder / source) for source in SOURCES)
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_directions():
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


def contracts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return project["tool"]["importlinter"]["contracts"]


def test_every_module_of_the_core_has_a_layer():
    (layers,) = (
        each["layers"]
        for each in contracts()
        if each["name"] == "rooms of the core import downwards only"
    )
    listed = {name.strip() for layer in layers for name in layer.split(":")}
    folder = ROOT / "core/src/inl"
    modules = [path.parent.name for path in folder.glob("*/__init__.py")]
    modules += [path.stem for path in folder.glob("*.py")]
    named = {f"inl.{name}" for name in modules if not name.startswith("__")}
    assert named == listed


CALLS = {"import_module", "__import__", "find_spec", "register"}
"""Functions that import a module by its name, now or later."""
BY_NAME = ("plugin/builtin.py",)
"""Modules of the core that may name a framework in them: the registration of functions
that compute on arrays of a caller's framework.
"""


def named_modules(source):
    """Literal arguments of calls that import a module by its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", None))
            for argument in node.args if name in CALLS else ():
                if isinstance(argument, ast.Constant):
                    yield str(argument.value)


def test_the_core_imports_no_framework_by_its_name():
    """import-linter sees import statements only."""
    (forbidden,) = (
        set(each["forbidden_modules"])
        for each in contracts()
        if each["name"] == "core and toolkit import no framework and no backend"
    )
    folder, found = ROOT / "core/src/inl", {}
    for path in folder.rglob("*.py"):
        for name in named_modules(path.read_text("utf-8")):
            if name.replace(":", ".").split(".")[0] in forbidden:
                found.setdefault(path.relative_to(folder).as_posix(), name)
    assert "plugin/builtin.py" in found, "this check can fail"
    assert [path for path in found if not path.startswith(BY_NAME)] == []


WRONG_IMPORTS = {
    "rooms of the core import downwards only": (
        "inl.spec.op",
        "inl.engine.inference_engine",
    ),
    "core and toolkit import no framework and no backend": (
        "inl.checkpoints.blocks.dtypes",
        "triton",
    ),
    "packages of the toolkit import downwards only": (
        "inl_toolkit.functional.arrays",
        "inl_toolkit.nn",
    ),
    "engine, libraries and plugins do not need the toolkit": (
        "inl_torch.functional",
        "inl_toolkit",
    ),
    "inl-torch imports no plugin": ("inl_torch.tensors", "inl_cpu"),
    "inl-jax imports neither torch nor a plugin": ("inl_jax.functional", "torch"),
    "inl-onnx imports no other framework and no plugin": (
        "inl_onnx.functions",
        "torch",
    ),
    "entry points import no framework and no library of one": (
        "inl_cpu.probe",
        "torch",
    ),
    "the build of torch is read without importing it": (
        "inl_torch.torch_build",
        "torch",
    ),
    "scheduling decides in integers and imports no tensors, models or devices": (
        "inl.scheduling.scheduler",
        "inl.ops.step",
    ),
    "protocol imports no models, weights or devices": (
        "inl.protocol.frame_check",
        "inl.weights.load",
    ),
    "executor reads frames and imports no requests": (
        "inl.executor.model_executor",
        "inl.scheduling.request",
    ),
    "recording imports no models, ops or devices": (
        "inl.recording.replay",
        "inl.backend.base",
    ),
    "workers and runners import no requests, ops or models": (
        "inl.workers.process",
        "inl.scheduling.request",
    ),
    "engine reaches devices through runners only": (
        "inl.engine.core",
        "inl.backend.base",
    ),
    "only the server imports what serves HTTP": ("inl.recording.outcome", "uvicorn"),
    "server reaches devices through the engine only": (
        "inl.serve.frontends.remote",
        "inl.executor.model_loader",
    ),
    "fleet knows engines by their messages only": (
        "inl.fleet.router",
        "inl.scheduling.request",
    ),
    "models are written over ops and import no devices": (
        "inl.models.blocks",
        "inl.backend.base",
    ),
    "plugins do not import each other": ("inl_cuda.tuning", "inl_cpu.probe"),
    "plugins and their libraries import no models and no engine": (
        "inl_cuda.settings",
        "inl.models.llama",
    ),
    "eager torch kernels do not import Triton": ("inl_torch.eager.norm", "triton"),
}
"""Contract -> (module, import that it forbids)."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The linter's report on a copy of the sources with every wrong import."""
    folder = tmp_path_factory.mktemp("sources")
    for source in SOURCES:
        shutil.copytree(ROOT / source, folder / source)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for module, name in WRONG_IMPORTS.values():
        (path,) = (
            found
            for source in SOURCES
            if (found := folder / source / f"{module.replace('.', '/')}.py").is_file()
        )
        path.write_text(f"{path.read_text('utf-8')}\nimport {name}\n", "utf-8")
    found = lint(folder)
    assert found.returncode == 1
    return found.stdout


def test_every_contract_has_a_wrong_import():
    assert {contract["name"] for contract in contracts()} == set(WRONG_IMPORTS)


@pytest.mark.parametrize("contract", WRONG_IMPORTS)
def test_a_wrong_import_breaks_its_contract(broken, contract):
    module, name = WRONG_IMPORTS[contract]
    summary, details = broken.split("Broken contracts")
    assert f"{contract} BROKEN" in summary
    # Titles are underlined; a contract may be broken several times.
    titles = {each: details.find(f"\n{each}\n--") for each in WRONG_IMPORTS}
    start = titles[contract]
    end = min((at for at in titles.values() if at > start), default=len(details))
    assert start >= 0
    assert f"{module} -> {name}" in details[start:end]
