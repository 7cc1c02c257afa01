"""The simulated device, and hosts with Intel GPUs as files of sysfs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inl.plugin import loader
from needed_packages import needing

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

pytest_pycollect_makemodule = needing(
    "openvino",
    modules=tuple(
        f"test_openvino_{name}.py" for name in ("contract", "models", "graphs")
    ),
)


@pytest.fixture
def openvino_cpu(monkeypatch):
    """Set ``INL_XPU_RUNTIME``, which is read when plugins are loaded."""
    monkeypatch.setenv("INL_XPU_RUNTIME", "openvino-cpu")
    caches = loader.registry, loader._registry_of
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Make a folder with ``sys`` of a host with cards (id, driver, memory)."""
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)

    def make(*cards, vendor="0x8086"):
        for number, (device_id, driver, memory) in enumerate(cards):
            folder = tmp_path / f"sys/class/drm/card{number}"
            (folder / "device").mkdir(parents=True)
            (folder / "device/vendor").write_text(f"{vendor}\n")
            (folder / "device/device").write_text(f"{device_id}\n")
            (folder / "device/driver").symlink_to(f"../../bus/pci/drivers/{driver}")
            if memory:
                (folder / "lmem_total_bytes").write_text(f"{memory}\n")
            (tmp_path / f"sys/class/drm/card{number}-DP-1").mkdir()
        return tmp_path

    return make


@pytest.fixture
def torch_version(tmp_path, monkeypatch):
    """Install a fake build of torch, which only its ``version.py`` describes."""
    from importlib.util import spec_from_file_location

    def make(source):
        folder = tmp_path / "site" / "torch"
        folder.mkdir(parents=True)
        (folder / "version.py").write_text(source)
        spec = spec_from_file_location("torch", folder / "__init__.py")
        monkeypatch.setattr("inl_torch.torch_build.find_spec", lambda _name: spec)

    return make
