"""``inl doctor``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inl.checkpoints.hub import resolve as hub
from inl.cli import checks_machine, checks_model, checks_packages
from inl.cli.checks import ORDER
from inl.cli.checks_machine import NEEDED_MEMORY, cgroup_cores, memory, threads
from inl.cli.checks_packages import Package
from inl.device import DeviceType
from inl.install_command import install_command
from inl.plugin.rows import install_line

NPU = """
from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.plugin import hookimpl

def there():
    return [DeviceInfo(0, "Acme")]

def absent():
    raise BackendUnavailable("driver not found")

@hookimpl
def inl_register_backends(register):
    register("npu", "{target}", probe={probe})

def make(device):
    from inl.backend.reference import ReferenceBackend
    return ReferenceBackend(device)
"""


def report(inl, env):
    done = inl("doctor", "--json", env=env)
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    return found


def of(found, subject):
    return [check for check in found["checks"] if check["subject"] == subject]


@pytest.fixture
def env(plugin, tmp_path):
    """A machine with a fake device on which the default model can run."""
    target = NPU.format(target="fake_npu:make", probe="there")
    return {**plugin(target), "INL_CACHE": str(tmp_path / "cache")}


def test_exit_code_0_if_the_default_model_can_run(inl, env):
    found = report(inl, env)
    assert found["ok"]
    assert of(found, "device auto")[0]["finding"].startswith("npu:0, computes in ")
    (model,) = of(found, "model")
    assert model["status"] == "warn"
    assert model["fix"] == "inl models smollm2-135m-instruct"


def test_exit_code_1_without_a_device(inl, env, plugin):
    plugin(NPU.format(target="m:C", probe="absent"))
    found = report(inl, env)
    assert not found["ok"]
    assert of(found, "device npu")[0]["finding"] == "driver not found"
    (auto,) = of(found, "device auto")
    assert (auto["status"], auto["fix"]) == ("wrong", install_command("inl-cpu"))


def test_a_backend_that_fails_to_open_is_wrong(inl, env, plugin):
    plugin(NPU.format(target="no_such:C", probe="there"))
    (auto,) = of(report(inl, env), "device auto")
    assert auto["status"] == "wrong"
    assert "No module named 'no_such'" in auto["finding"]


def test_a_broken_plugin_has_a_reason_and_a_fix(inl, env, plugin):
    plugin("raise ImportError('libx.so: cannot open')", "broken_one")
    env = {**env, "INL_PLUGINS": f"{env['INL_PLUGINS']},broken_one"}
    (row,) = of(report(inl, env), "plugin broken_one")
    assert (row["status"], row["finding"]) == (
        "warn",
        "broken: ImportError: libx.so: cannot open",
    )
    assert "INL_PLUGINS" in row["fix"]


def test_a_damaged_model_file_is_wrong(inl, env):
    folder = Path(env["INL_CACHE"])
    folder.mkdir()
    file = folder / hub.DEFAULT.member.rpartition("/")[2]
    file.write_bytes(b"GGUF, but no more")
    (model,) = of(report(inl, env), "model")
    assert model["status"] == "wrong"
    assert f"{file} is damaged: sha256 is " in model["finding"]
    assert model["fix"].startswith(f"rm '{file}'; inl models ")


def test_every_problem_has_a_fix(inl, env):
    for check in report(inl, {**env, "INL_THREADS": "0", "INL_PLUGINS": "x"})["checks"]:
        assert (check["status"] == "ok") == (check["fix"] == "")


def test_checks_are_sorted_by_severity(inl, env):
    done = inl("doctor", env={**env, "INL_THREADS": "many"})
    assert done.returncode == 1
    first, *_, last = done.stdout.splitlines()
    assert first.split()[:2] == ["wrong", "threads"]
    assert "INL_THREADS is 'many'" in first
    assert "try: export INL_THREADS=" in first
    assert last.startswith("the default model cannot run: ")
    seen = [line.split()[0] for line in done.stdout.splitlines()[:-1]]
    assert [each for each in ORDER if each in seen] == list(dict.fromkeys(seen))


@pytest.mark.parametrize(
    ("cores", "allowed", "environment", "status", "fix"),
    [
        (4, None, {}, "ok", ""),
        (4, 8.0, {}, "ok", ""),
        (64, 2.0, {}, "warn", "export INL_THREADS=2"),
        (64, 0.5, {}, "warn", "export INL_THREADS=1"),
        (64, 2.0, {"INL_THREADS": "2"}, "ok", ""),
        (4, None, {"OMP_NUM_THREADS": "1"}, "warn", "export OMP_NUM_THREADS=4"),
        (4, None, {"INL_THREADS": "8"}, "warn", "export INL_THREADS=4"),
        (4, None, {"INL_THREADS": "-1"}, "wrong", "export INL_THREADS=4"),
        (4, None, {"OMP_NUM_THREADS": "4,2"}, "warn", "export OMP_NUM_THREADS=4"),
    ],
)
def test_threads(cores, allowed, environment, status, fix):
    check = threads(cores, allowed, environment)
    assert (check.status, check.fix) == (status, fix)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, 2.0),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": ""}, None),
        ({}, None),
    ],
)
def test_cgroup_cpu_quota(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_cores(tmp_path) == cores


def test_memory():
    states = [memory(NEEDED_MEMORY * share // 4).status for share in (3, 4, 7, 8)]
    assert states == ["wrong", "warn", "warn", "ok"]


@pytest.mark.parametrize(
    ("version", "needed", "status"),
    [
        (None, True, "wrong"),
        (None, False, "warn"),
        ("0.9.9", True, "wrong"),
        ("1.9", True, "warn"),
        ("1.10rc1", True, "ok"),
        ("2", True, "ok"),
    ],
)
def test_packages(version, needed, status):
    package = Package("acme", (1, 10), "inl-core[text]", "acme", needed)
    check = checks_packages.package_version(package, version)
    assert check.status == ("wrong" if version == "1.9" else status)
    fix = install_command("inl-core[text]", options="-U")
    assert check.fix == ("" if status == "ok" else fix)


def test_the_toolkit_is_known_and_not_needed(monkeypatch):
    monkeypatch.setattr(checks_packages, "_version", lambda _: None)
    rows = {check.subject: check for check in checks_packages.package_checks()}
    assert (rows["inl-toolkit"].status, rows["inl-toolkit"].fix) == (
        "warn",
        install_command("inl-toolkit", options="-U"),
    )


def test_an_old_python_is_wrong():
    assert checks_packages.python((3, 10, 4)).status == "wrong"
    assert checks_packages.python((3, 11, 0)).status == "ok"


def test_a_driver_without_a_backend_has_an_install_command(without_backend):
    without_backend("rocm")
    rows = list(checks_packages.unsupported_hardware(lambda path: path == "/dev/kfd"))
    assert [(row.subject, row.fix) for row in rows] == [
        ("device rocm", install_line(DeviceType.ROCM))
    ]


class FakeDistribution:
    """Fake of ``importlib.metadata.Distribution``."""

    def __init__(self, version, requires, size):
        self.version, self.requires = version, requires
        self.files = [type("File", (), {"size": size})()]


CUDA = {
    "torch": FakeDistribution(
        "2.9.0", ["nvidia-cublas-cu12==12.8; x", "sympy"], 900 << 20
    ),
    "nvidia-cublas-cu12": FakeDistribution("12.8", None, 2 << 30),
}


@pytest.mark.parametrize(
    ("installed", "gpu", "status", "said"),
    [
        (CUDA, False, "warn", "2.9 GiB: a CUDA build on a machine without a GPU"),
        (CUDA, True, "ok", "with CUDA"),
        ({"torch": FakeDistribution("2.9.0+cpu", [], 1 << 20)}, False, "ok", "1.0 MiB"),
        (
            {"torch": FakeDistribution("2.10.0+rocm7.1", ["triton-rocm"], 1 << 20)},
            False,
            "ok",
            "2.10.0+rocm7.1, 1.0 MiB",
        ),
        (
            {"torch": FakeDistribution("2.9.0", ["sympy"], 1 << 20)},
            False,
            "ok",
            "1.0 MiB",
        ),
    ],
)
def test_the_build_of_torch(monkeypatch, installed, gpu, status, said):
    def distribution(name):
        if name not in installed:
            raise checks_packages.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(checks_packages, "distribution", distribution)
    (check,) = checks_packages.torch_build(lambda _: gpu)
    assert check.status == status
    assert said in check.finding


@pytest.mark.parametrize(
    ("writable", "needed", "status"),
    [(True, True, "ok"), (False, True, "wrong"), (False, False, "warn")],
)
def test_the_cache(tmp_path, writable, needed, status):
    check = checks_model.cache(tmp_path, writable=writable, needed=needed)
    assert check.status == status


def test_a_cache_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert not checks_model.is_writable(tmp_path / "file" / "cache")
    assert checks_model.is_writable(tmp_path / "new" / "cache")


def test_a_full_disk(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 5})
    monkeypatch.setattr(checks_machine.shutil, "disk_usage", lambda _: usage)
    assert checks_machine.disk(tmp_path).status == "warn"
