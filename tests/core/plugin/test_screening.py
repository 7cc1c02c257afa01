"""A plugin that hangs or crashes where it is imported does not affect the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from inl.device import Device
from inl.plugin import loader, screening
from inl.plugin.discover import from_modules
from inl.plugin.private_facts import plugin_key, read_facts, write_facts
from waiting import is_running, until

HOOK = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    {body}
    register("npu", "m:C")
"""
HANG = "import time; time.sleep(600)"


@pytest.fixture
def load(site, monkeypatch, tmp_path):
    """Load one plugin as ``registry()`` does, with a cache of its own."""
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "installed", lambda: ([], []))
    for name in ("registry", "_registry_of"):  # what other tests loaded stays
        function = getattr(loader, name).__wrapped__
        monkeypatch.setattr(loader, name, cache(function))
    started = []

    class Child(screening.Child):
        def __init__(self, origin):
            started.append(self)
            super().__init__(origin)

    monkeypatch.setattr(screening, "Child", Child)

    def run(source=None, *, name="zzz"):
        if source is not None:
            site.module(name, source)
        monkeypatch.setenv("INL_PLUGINS", name)
        sys.modules.pop(name, None)
        return loader.registry.__wrapped__()

    run.started = started
    yield run
    for child in started:
        child._process.kill()


BAD = {
    "exits at once": (
        "import os; os._exit(7)",
        "the process of its import ended with exit status 7",
    ),
    "crashes": (
        "import ctypes; ctypes.string_at(0)",
        "the process of its import was killed by SIGSEGV",
    ),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", "import raised Keyboard"),
    "exits in a hook": (
        HOOK.format(body="import os; os._exit(3)"),
        "the process of its import ended with exit status 3",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_plugin_that_ends_its_process_is_a_row(load, row_of, case):
    source, reason = BAD[case]
    row = row_of(load(source), "zzz")
    assert row.status == "broken"
    assert row.detail.startswith(reason)
    assert "zzz" not in sys.modules


@pytest.mark.parametrize("source", [HANG, HOOK.format(body=HANG)])
def test_a_plugin_that_hangs_is_a_row_and_is_not_waited_for_again(
    load, row_of, monkeypatch, source
):
    monkeypatch.setattr(screening, "LIMIT_SECONDS", 1.0)
    reason = "import took over 1 s"
    assert row_of(load(source), "zzz").detail == reason
    assert row_of(load(), "zzz").detail == reason
    assert len(load.started) == 1
    (origin,) = from_modules(["zzz"])
    assert 'zzz.py", line' in screening.recall(origin).where


@pytest.mark.parametrize("end", ["pass", "os._exit(7)", HANG])
def test_a_plugin_whose_process_leaves_another_one_is_not_waited_for(
    load, row_of, monkeypatch, tmp_path, end
):
    """The other one holds the pipes of the first."""
    monkeypatch.setattr(screening, "LIMIT_SECONDS", 1.0 if end == HANG else 500.0)
    pid = tmp_path / "pid"
    body = f"""
import os, subprocess
if "{screening.CHILD}" in os.environ:
    held = subprocess.Popen(["sleep", "600"])
    open({str(pid)!r}, "w").write(str(held.pid))
    {end}
{HOOK.format(body="pass")}
"""
    row = row_of(load(body), "zzz")
    assert row.status == ("ready" if end == "pass" else "broken")
    until(lambda: not is_running(int(pid.read_text())))


def test_a_plugin_is_tested_again_when_it_changes(load, row_of, site):
    load("import os; os._exit(7)")
    known = load(HOOK.format(body="pass"))
    assert row_of(known, "zzz").status == "ready"
    assert len(load.started) == 2
    assert row_of(load(), "zzz").status == "ready"
    assert len(load.started) == 2


def test_a_crash_is_forgotten_after_an_hour(load, monkeypatch):
    load("import os; os._exit(7)")
    (origin,) = from_modules(["zzz"])
    assert screening.recall(origin)
    now = screening.time() + 3700
    monkeypatch.setattr(screening, "time", lambda: now)
    assert screening.recall(origin) is None


def test_ordinary_errors_are_reported_by_this_process(load, row_of):
    for source in ("raise OSError('no driver')", None):
        row = row_of(load(source), "zzz")
        assert row.detail == "OSError: no driver"
    assert len(load.started) == 1


def test_an_explicit_device_does_not_wait_for_another_plugin(load, site, monkeypatch):
    site.module("inl_other", HANG)
    monkeypatch.setenv("INL_PLUGINS", "inl_other")
    monkeypatch.setattr(screening, "LIMIT_SECONDS", 500.0)
    monkeypatch.setattr(loader, "registry", _Unused())
    assert Device("reference").why_not() is None
    assert loader.registry_for("reference").kernels("reference") == ()
    (child,) = load.started
    assert child._process.poll() is None


class _Unused:
    @staticmethod
    def cache_info():
        return type("Info", (), {"currsize": 0})

    def __call__(self):
        raise AssertionError("all plugins were loaded")


def test_known_plugins_of_other_types_are_not_imported(load, site, monkeypatch):
    load(HOOK.format(body="pass"))
    del sys.modules["zzz"]
    assert "npu" not in loader.registry_for("reference").types
    assert "zzz" not in sys.modules
    assert {"npu", "reference"} <= set(loader.registry_for("npu").types)


def test_a_type_of_an_untested_plugin_with_another_name_is_found(load, site, caplog):
    caplog.set_level("INFO", "inl")
    site.module("zzz", HOOK.format(body="pass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INL_PLUGINS", "zzz")
        assert loader.registry_for("npu").backend("npu") is not None
    assert len(load.started) == 1
    assert not caplog.records


def planted(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize("how", ["writable", "garbage", "fields", "link", "folder"])
def test_planted_files_are_ignored(load, tmp_path, how):
    load("import os; os._exit(7)")
    (origin,) = from_modules(["zzz"])
    key = plugin_key(origin)
    (path,) = (tmp_path / "cache" / "plugins").iterdir()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    good = path.read_text()
    if how == "writable":
        path.chmod(0o666)
    elif how == "garbage":
        planted(path, "[1, 2")
    elif how == "fields":
        planted(path, json.dumps({**json.loads(good), "reason": 5}))
    elif how == "link":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    else:
        path.parent.chmod(0o777)
    assert read_facts(key, screening.TYPES) is None
    assert screening.recall(origin) is None


def test_a_folder_of_another_kind_is_no_error(load, row_of, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    assert row_of(load(HOOK.format(body="pass")), "zzz").status == "ready"
    with pytest.raises(NotADirectoryError):
        write_facts("0" * 64, {})


def test_ctrl_c_ends_the_child(load, monkeypatch):
    monkeypatch.setattr(screening, "LIMIT_SECONDS", 500.0)

    def interrupted(self, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(HANG)
    monkeypatch.undo()
    assert load.started[0]._process.wait(300) != 0


def inl(site, *words, cache, plugins="zzz"):
    path = os.pathsep.join([str(site.path), *filter(None, sys.path)])
    variables = {"INL_PLUGINS": plugins, "PYTHONPATH": path, "INL_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "inl", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | variables,
    )


def test_what_a_plugin_prints_is_not_in_the_output(site, tmp_path):
    loud = "print('loaded', flush=True)\n" + HOOK.format(body="print('hook')")
    site.module("zzz", loud)
    done = inl(site, "plugins", "--json", cache=tmp_path)
    assert "zzz" in {row["name"] for row in json.loads(done.stdout)}
    assert done.stderr == "loaded\nhook\n"


def test_debug_shows_where_a_plugin_raised(site, tmp_path):
    site.module("zzz", "x = 1\nraise OSError('no driver')\n")
    plain = inl(site, "plugins", cache=tmp_path)
    assert "OSError: no driver" in plain.stdout
    assert "Traceback" not in plain.stderr
    shown = inl(site, "--debug", "plugins", cache=tmp_path).stderr
    assert f'File "{site.path / "zzz.py"}", line 2' in shown


def test_the_watchdog_ends_a_child_without_a_parent(site, tmp_path):
    site.module("zzz", HANG)
    path = os.pathsep.join([str(site.path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "inl.plugin.screen_child", "zzz", "0.5"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode != 0
    assert "Timeout (" in done.stderr
