"""``inl devices`` and ``inl plugins``."""

from __future__ import annotations

import json
import os

import pytest

from inl.cli.devices import show_bytes
from inl.cli.main import main

NPU = """
from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.plugin import hookimpl

def there():
    return [DeviceInfo(0, "[bold]Acme[/bold]", 3 * 2**30), DeviceInfo(1, "Acme")]

def absent():
    raise BackendUnavailable("driver not found")

def interrupted():
    import os, signal, time
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)

@hookimpl
def inl_register_backends(register):
    register("npu", "m:C", probe={probe})
"""


def lines(done, *starts):
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.splitlines()
    return [line.split(maxsplit=2) for line in shown if line.startswith(starts)]


def test_devices(inl, plugin):
    done = inl("devices", env=plugin(NPU.format(probe="there")))
    assert lines(done, "npu") == [
        ["npu:0", "[bold]Acme[/bold]", "3.0 GiB"],
        ["npu:1", "Acme"],
    ]
    ((_, *name),) = lines(done, "reference:0")
    assert " ".join(name).startswith("NumPy reference")


def test_an_unavailable_device_has_a_reason(inl, plugin):
    env = plugin(NPU.format(probe="absent"))
    assert lines(inl("devices", env=env), "npu") == [
        ["npu", "unavailable", "driver not found"]
    ]
    assert lines(inl("plugins", env=env), "fake_npu") == [
        ["fake_npu", "INL_PLUGINS", "unavailable  npu: driver not found"]
    ]


def test_a_broken_plugin_is_listed_and_the_exit_code_is_0(inl, plugin):
    env = plugin("raise ImportError('libnpu.so: cannot open')")
    assert lines(inl("devices", env=env), "fake_npu") == [
        ["fake_npu", "broken", "ImportError: libnpu.so: cannot open"]
    ]
    assert lines(inl("plugins", env=env), "fake_npu") == [
        ["fake_npu", "INL_PLUGINS", "broken  ImportError: libnpu.so: cannot open"]
    ]


def test_columns_are_aligned(inl, plugin):
    done = inl("plugins", env=plugin(NPU.format(probe="there")))
    shown = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("reference", "fake_npu"))
    ]
    assert len(shown) == 2
    assert len({line.index("  ready  ") for line in shown}) == 1
    assert all(line == line.rstrip() for line in shown)


def test_devices_as_json(inl, plugin):
    done = inl("devices", "--json", env=plugin(NPU.format(probe="there")))
    rows = [row for row in json.loads(done.stdout) if row["device"] == "npu:0"]
    assert rows == [
        {
            "device": "npu:0",
            "status": "ready",
            "name": "[bold]Acme[/bold]",
            "memory_bytes": 3 * 2**30,
            "plugin": "INL_PLUGINS",
            "reason": None,
            "note": "",
        }
    ]


def test_plugins_as_json(inl, plugin):
    done = inl("plugins", "--json", env=plugin(NPU.format(probe="absent")))
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["fake_npu"] == {
        "name": "fake_npu",
        "distribution": None,
        "version": None,
        "source": "INL_PLUGINS",
        "status": "unavailable",
        "detail": "npu: driver not found",
    }
    assert rows["reference"]["status"] == "ready"


def test_ctrl_c_in_a_probe_exits_with_130(inl, plugin):
    assert inl("devices", env=plugin(NPU.format(probe="interrupted"))).returncode == 130


def test_a_terminal_gets_a_table(inl, plugin):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    try:
        env = {**plugin(NPU.format(probe="there")), "TERM": "dumb", "COLUMNS": "100"}
        done = inl("devices", env=env, stdout=theirs)
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    heads, *rows = shown.splitlines()
    assert heads.split() == ["device", "name", "memory"]
    assert any("[bold]Acme[/bold]" in row for row in rows)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**40 - 1, "1024.0 GiB"),
        (5 * 2**50, "5120.0 TiB"),
    ],
)
def test_show_bytes(count, text):
    assert show_bytes(count) == text


@pytest.mark.parametrize("command", ["devices", "plugins"])
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_fast_path_prints_the_same_as_the_parser(command, words, capsys):
    assert main([command, *words]) == 0
    short = capsys.readouterr().out
    assert main([command, *words, *words, "--"]) == 0
    assert capsys.readouterr().out == short


def test_devices_says_why_auto_selects_one(inl, plugin):
    done = inl("devices", "--why", env=plugin(NPU.format(probe="there")))
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert last == "auto selects npu:0: no other device type is available"
