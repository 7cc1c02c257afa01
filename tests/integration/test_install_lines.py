"""README, page, error and `inl doctor` name the same index, extras and Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from inl.cli.checks_packages import OLDEST_PYTHON
from inl.device import DeviceType
from inl.errors import BackendUnavailable
from inl.plugin import rows
from inl_directml import settings
from inl_intel import probe as intel
from inl_rocm import probe as rocm
from inl_torch import torch_build
from inl_tpu import probe as tpu

ROOT = Path(__file__).parents[2]
INDEX = re.compile(r"--index-url\s+(https://[\w./]+)")
INSTALL = {
    "rocm": ("hip", rocm.INSTALL),
    "intel": ("xpu", intel.INSTALL),
}
"""Plugin -> the runtime that its torch is built for, and the command of its errors."""


def readme(name):
    return (ROOT / f"plugins/inl-{name}/README.md").read_text("utf-8")


@pytest.mark.parametrize("name", INSTALL)
def test_readme_and_page_name_the_index_of_the_error(name, monkeypatch):
    runtime, command = INSTALL[name]
    build = torch_build.TorchBuild("2.13.0+cpu", {})
    monkeypatch.setattr(torch_build, "installed_torch", lambda: build)
    with pytest.raises(BackendUnavailable) as refused:
        torch_build.require_torch(runtime, command)
    (index,) = INDEX.findall(str(refused.value))
    page = (ROOT / "docs/amd-intel.md").read_text("utf-8")
    assert INDEX.findall(readme(name)) == [index]
    assert index in INDEX.findall(page)


def test_a_type_without_a_package_names_the_index_or_the_extra_of_the_plugin():
    """The command of `inl devices`, and of errors, where the package is missing."""
    for kind, (_, command) in zip(("rocm", "xpu"), INSTALL.values(), strict=True):
        assert INDEX.findall(rows.install_line(DeviceType(kind))) == INDEX.findall(
            command
        )
    assert rows.install_line(DeviceType.DIRECTML) == settings.INSTALL["dml"]
    assert rows.install_line(DeviceType.TPU) == tpu.INSTALL["tpu"]


def test_readme_names_every_extra_of_the_errors():
    project = tomllib.loads((ROOT / "plugins/inl-directml/pyproject.toml").read_text())
    for provider, command in settings.INSTALL.items():
        (extra,) = re.findall(r"inl-directml\[(\w+)\]", command)
        assert extra in project["project"]["optional-dependencies"]
        row = next(
            line for line in readme("directml").splitlines() if f"`{provider}`" in line
        )
        assert f"`inl-directml[{extra}]`" in row


@pytest.mark.parametrize("name", [*INSTALL, "directml"])
def test_the_python_of_the_package_is_the_doctors(name):
    text = (ROOT / f"plugins/inl-{name}/pyproject.toml").read_text("utf-8")
    oldest = ".".join(map(str, OLDEST_PYTHON))
    assert tomllib.loads(text)["project"]["requires-python"] == f">={oldest}"
    assert f"Python {oldest}" in readme(name)
