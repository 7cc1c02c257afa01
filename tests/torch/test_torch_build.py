"""The build of torch, read from its files without importing it."""

from __future__ import annotations

import pytest

from inl.errors import BackendUnavailable
from inl.plugin import frameworks
from inl_torch import torch_build
from inl_torch.torch_build import TorchBuild, installed_torch, require_torch


@pytest.fixture
def torch_files(tmp_path, monkeypatch):
    from importlib.util import spec_from_file_location

    def make(source):
        (tmp_path / "version.py").write_text(source)
        spec = spec_from_file_location("torch", tmp_path / "__init__.py")
        for module in (torch_build, frameworks):
            monkeypatch.setattr(module, "find_spec", lambda _name: spec)
        monkeypatch.setattr(frameworks, "import_failure", lambda _name: "")

    return make


@pytest.mark.parametrize(
    ("source", "build", "text"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", {}, "CPUs only"),
        ("__version__ = '2.4.1'\ncuda = '12.4'\nhip = None\n", {"cuda": "12.4"},
         "CUDA 12.4"),
        ("__version__ = '2.10'\nhip: Optional[str] = '7.1.2'\ncuda: str = None\n",
         {"hip": "7.1.2"}, "ROCm 7.1.2"),
    ],
)  # fmt: skip
def test_the_build_of_torch_is_read_from_its_files(torch_files, source, build, text):
    torch_files(source)
    found = installed_torch()
    assert found == TorchBuild(found.version, build)
    assert str(found) == f"torch {found.version}, built for {text}"


def test_a_build_for_another_runtime_is_refused_with_the_command(torch_files):
    torch_files("__version__ = '2.4.1'\ncuda = '12.4'\n")
    assert require_torch("cuda", "pip install torch").version == "2.4.1"
    with pytest.raises(BackendUnavailable, match=r"needs a build for XPU. Try: pip"):
        require_torch("xpu", "pip install torch")


@pytest.mark.parametrize("source", ["", "__version__ = None\n", "\udcff"])
def test_a_damaged_torch_is_a_sentence(tmp_path, torch_files, source):
    torch_files("")
    (tmp_path / "version.py").write_bytes(source.encode("utf-8", "surrogateescape"))
    with pytest.raises(BackendUnavailable, match=r"torch is damaged: .*version\.py"):
        installed_torch()
