"""A host with AMD GPUs, as files of sysfs."""

from __future__ import annotations

import importlib.util

import pytest

from inl_rocm.probe import VISIBLE

NAMES = [name for level in VISIBLE for name in level]

CPU = "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Make a folder with ``sys`` and ``dev`` of a host with these GPUs."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def make(*nodes, driver=True, device_file=True):
        if driver:
            folder = tmp_path / "sys/class/kfd/kfd/topology/nodes"
            _write(folder / "0" / "properties", CPU)
            for number, node in enumerate(nodes, 1):
                _write(folder / str(number) / "properties", _properties(node))
                bank = folder / str(number) / "mem_banks/0/properties"
                _write(bank, f"heap_type 1\nsize_in_bytes {node.memory}\n")
        if device_file:
            _write(tmp_path / "dev/kfd", "")
        return tmp_path

    return make


def _properties(node):
    return (
        "cpu_cores_count 0\nsimd_count 1216\nlocal_mem_size 0\n"
        f"gfx_target_version {node.version}\nunique_id {node.unique_id}\n"
        f"domain 0\nlocation_id {node.location}\n"
    )


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def torch_files(tmp_path, monkeypatch):
    """Install a fake build of torch, which only its ``version.py`` describes."""

    def make(source):
        folder = tmp_path / "site" / "torch"
        if source is not None:
            _write(folder / "version.py", source)
        spec = importlib.util.spec_from_file_location("torch", folder / "__init__.py")
        monkeypatch.setattr(
            "inl_torch.torch_build.find_spec", lambda _name: spec, raising=True
        )

    return make
