"""Faulty plugins: each is a row with a reason and does not affect the others."""

from __future__ import annotations

import pytest

from inl.cli.devices import device_rows
from inl.device import DeviceType
from inl.errors import BackendUnavailable
from inl.install_command import install_command, pip_command
from inl.plugin import FEATURES, device_selection, make_backend

BACKENDS = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    {body}
"""
MODELS = BACKENDS.replace("backends", "models")
PLACES, FORMATS, DRAFTERS, COMMANDS = (
    BACKENDS.replace("backends", kind)
    for kind in ("places", "formats", "drafters", "commands")
)
KERNELS = BACKENDS.replace("backends(register)", "kernels(register, device_type)")


def backends(body):
    return BACKENDS.format(body=body)


BAD = {
    "raises on import": ("1 / 0", "ZeroDivisionError: division by zero"),
    "exits on import": ("raise SystemExit(3)", "SystemExit: 3"),
    "raises outside Exception": (
        "class Odd(BaseException): pass\nraise Odd('so there')",
        "Odd: so there",
    ),
    "has bad syntax": ("def (:", "SyntaxError: invalid syntax"),
    "misses a library": (
        "raise ImportError('libnpu.so: cannot open shared object file')",
        "ImportError: libnpu.so: cannot open shared object file",
    ),
    "speaks in many lines": ("raise ValueError('a\\n  b\\n')", "ValueError: a b"),
    "cannot show its error": (
        "class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute",
        "Mute: (its message cannot be shown)",
    ),
    "raises in a hook": (backends("raise KeyError('x')"), "KeyError: 'x'"),
    "exits in a hook": (backends("exit('bye')"), "SystemExit: bye"),
    "implements nothing": ("x = 1", "implements no hook of inl.v2; known: inl_regis"),
    "misspells a hook": (
        "from inl.plugin import hookimpl\n"
        "@hookimpl\ndef inl_register_backend(register): pass",
        "inl_register_backend is not a hook of inl.v2; known: inl_register_backends",
    ),
    "misspells by specname": (
        "from inl.plugin import hookimpl\n"
        "@hookimpl(specname='inl_backends')\ndef f(register): pass",
        "inl_backends is not a hook of inl.v2",
    ),
    "forgets the marker": (
        "def inl_register_backends(register): pass",
        "inl_register_backends: lacks @hookimpl from inl.plugin",
    ),
    "asks for an unknown argument": (
        "from inl.plugin import hookimpl\n"
        "@hookimpl\ndef inl_register_backends(register, config): pass",
        "inl_register_backends: found the argument 'config', accepted: register",
    ),
    "returns its items": (
        backends("return [('npu', 'm:C')]"),
        "a hook returned [('npu', 'm:C')]; hooks call register and return None",
    ),
    "registers with too little": (backends("register('npu')"), "TypeError: "),
    "registers a bad device type": (
        backends("register('NPU!', 'm:C')"),
        "DeviceError: device type: found 'NPU!', accepted: lower-case",
    ),
    "registers a number as device type": (
        backends("register(7, 'm:C')"),
        "DeviceError: device type: found 7, accepted: lower-case",
    ),
    "registers a bad backend": (
        backends("register('npu', 'just.a.module')"),
        "backend of npu: found 'just.a.module', accepted: a string 'module:attribute'",
    ),
    "registers no backend": (
        backends("register('npu', None)"),
        "backend of npu: found None, accepted: a string 'module:attribute' or a class",
    ),
    "registers a bad probe": (
        backends("register('npu', 'm:C', probe=3)"),
        "probe of npu: found 3, accepted: a string 'module:attribute' or a function",
    ),
    "registers twice": (
        backends("register('npu', 'm:C'); register('npu', 'm:D')"),
        "backend of npu: registered twice",
    ),
    "takes the reference": (
        backends("register('reference', 'm:C')"),
        "device type reference is already registered by plugin reference (builtin)",
    ),
    "takes an architecture": (
        MODELS.format(body="register('llama', 'm:M')"),
        "model llama is already registered by plugin reference (builtin)",
    ),
    "registers a bad architecture": (
        MODELS.format(body="register('', 'm:M')"),
        "model: found the architecture '', accepted: a name such as LlamaForCausalLM",
    ),
    "registers a bad model": (
        MODELS.format(body="register('Odd', object)"),
        "model Odd: found <class 'object'>, accepted: a string 'module:attribute'",
    ),
    "registers a bad kernel": (
        KERNELS.format(body="register([1])"),
        "kernels for reference: found [1], accepted: a string 'module:attribute' or ",
    ),
    "registers a bad scheme": (
        PLACES.format(body="register('Ray:', 'm:start')"),
        "place: found 'Ray:', accepted: a scheme such as ray",
    ),
    "registers no place": (
        PLACES.format(body="register('ray', 7)"),
        "place ray: found 7, accepted: a string 'module:attribute' or a function",
    ),
    "takes a place": (
        PLACES.format(body="register('worker', 'm:start')"),
        "place worker is already registered by plugin reference (builtin)",
    ),
    "registers a bad suffix": (
        FORMATS.format(body="register('npz', 'm:read')"),
        "format: found 'npz', accepted: a suffix such as .npz",
    ),
    "takes a format": (
        FORMATS.format(body="register('.gguf', 'm:read')"),
        "format .gguf: read by inl-core; accepted: another suffix",
    ),
    "registers a format twice": (
        FORMATS.format(body="register('.npz', 'm:a'); register('.npz', 'm:b')"),
        "format .npz: registered twice",
    ),
    "registers a bad drafter": (
        DRAFTERS.format(body="register('A tree', 'm:make')"),
        "drafter: found 'A tree', accepted: a name such as suffix_tree",
    ),
    "takes a drafter": (
        DRAFTERS.format(body="register('eagle', 'm:make')"),
        "drafter eagle: part of inl-core; accepted: another name",
    ),
    "registers a bad command": (
        COMMANDS.format(body="register('--help', 'm:run', 'Help.')"),
        "command: found '--help', accepted: a word such as fine-tune, of at most 32",
    ),
    "takes a command": (
        COMMANDS.format(body="register('serve', 'm:run', 'Serve.')"),
        "command serve is already registered by plugin reference (builtin)",
    ),
    "registers a command without a summary": (
        COMMANDS.format(body="register('greet', 'm:run')"),
        "TypeError: ",
    ),
    "registers a command with a page": (
        COMMANDS.format(body="register('greet', 'm:run', 'Two\\nlines.')"),
        "command greet: summary: found 'Two\\nlines.', accepted: one line of at most",
    ),
    "fails in its kernels": (KERNELS.format(body="1 / 0"), "ZeroDivisionError"),
    "has an odd contract": ("INL_CONTRACT = '1.0'", "INL_CONTRACT: found '1.0', accep"),
    "has odd features": ("INL_FEATURES = 'fast'", "INL_FEATURES: found 'fast', accept"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_plugin_is_a_row(good, row_of, case):
    source, sentence = BAD[case]
    good.add("zzz", source, version="0.3")
    known = good.load()
    row = row_of(known, "zzz")
    assert (row.status, row.distribution, row.version) == ("broken", "zzz", "0.3")
    assert row.detail.startswith(sentence)
    assert "\n" not in row.detail
    assert row_of(known, "good").status == "ready"
    assert row_of(known, "reference").status == "ready"
    assert set(known.types) == {"good", "reference"}


SERVED = "this core serves 2.1 and 1.0 to 1.2"
UPGRADE = "; try: " + install_command("inl-core", options="-U")
MOVE = (
    "INL_CONTRACT is {}, but the entry point is in group {}, of contract {}; move it "
    "to group {}"
)
UNSUPPORTED = {
    "a newer minor": ("inl.v2", (2, 9), f"needs contract 2.9, {SERVED}{UPGRADE}"),
    "a newer major": ("inl.v2", (3, 0), f"needs contract 3.0, {SERVED}{UPGRADE}"),
    "an unknown minor of 1": (
        "inl.v1", (1, 7), f"needs contract 1.7, {SERVED}{UPGRADE}",
    ),
    "one before the first": ("inl.v1", (0, 3), f"needs contract 0.3, {SERVED}"),
    "the next major in the group of 1": (
        "inl.v1", (2, 0), MOVE.format((2, 0), "inl.v1", 1, "inl.v2"),
    ),
    "the former major in the group of 2": (
        "inl.v2", (1, 1), MOVE.format((1, 1), "inl.v2", 2, "inl.v1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_contract_that_is_not_served_is_unsupported(good, row_of, case):
    group, contract, sentence = UNSUPPORTED[case]
    good.add("zzz", f"INL_CONTRACT = {contract}", group=group)
    row = row_of(good.load(), "zzz")
    assert (row.status, row.detail) == ("unsupported", sentence)


def test_a_module_by_name_has_the_contract_that_it_says(good, row_of):
    good.module("newer", f"{GOOD_NPU}\nINL_CONTRACT = (3, 0)")
    good.module("older", f"{GOOD_NPU}\nINL_CONTRACT = (1, 1)")
    known = good.load("newer", "older")
    assert row_of(known, "newer").status == "unsupported"
    row = row_of(known, "older")
    assert (row.status, row.detail) == (
        "ready", "contract 1.1, through the adapter; 1 device",
    )  # fmt: skip


GOOD_NPU = backends("register('npu', 'inl.backend.reference:ReferenceBackend')")


@pytest.mark.parametrize(
    ("group", "contract"), [("inl.v1", (1, 2)), ("inl.v2", (2, 0))]
)
def test_a_plugin_without_a_contract_has_that_of_its_group(site, group, contract):
    site.add("zzz", GOOD_NPU, group=group)
    assert site.load().backend("npu").contract == contract


def test_an_unknown_feature_is_unsupported(good, row_of):
    good.add("zzz", "INL_FEATURES = {'warp', 'beam'}")
    row = row_of(good.load(), "zzz")
    assert row.status == "unsupported"
    assert row.detail == (
        f"needs beam, warp; this core has {', '.join(sorted(FEATURES))} in contract "
        f"2.1{UPGRADE}"
    )


def test_a_plugin_may_require_every_feature_of_the_core(good, row_of):
    good.add("zzz", f"{GOOD_NPU}\nINL_FEATURES = {set(FEATURES)}")
    assert row_of(good.load(), "zzz").status == "ready"


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ("inl.v0", f"needs contract 0, {SERVED}"),
        ("inl.v3", f"needs contract 3, {SERVED}{UPGRADE}"),
    ],
)
def test_another_major_is_a_row_and_is_not_imported(good, row_of, group, sentence):
    good.add("zzz", "raise AssertionError('imported')", group=group)
    row = row_of(good.load(), "zzz")
    assert (row.status, row.detail) == ("unsupported", sentence)


def test_a_plugin_that_serves_several_majors_is_the_newest_served(site, row_of):
    module = site.add("zzz", GOOD_NPU)
    (info,) = site.path.glob("zzz-*.dist-info")
    groups = "inl.v0", "inl.v1", "inl.v2", "inl.v3"
    lines = "".join(f"[{group}]\nnpu = {module}\n" for group in groups)
    (info / "entry_points.txt").write_text(lines)
    assert row_of(site.load(), "npu").detail == "1 device"
    (info / "entry_points.txt").write_text(lines.replace("v2]", "v4]"))
    detail = row_of(site.load(), "npu").detail
    assert detail == "contract 1.2, through the adapter; 1 device"


HANGS = """
import threading
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    register("npu", "m:C", probe=threading.Event().wait)
"""


def test_a_hanging_probe_times_out(good, monkeypatch):
    good.add("zzz", HANGS)
    known = good.load()
    assert known.find(DeviceType("good")).devices
    monkeypatch.setattr("inl.plugin.probe.TIMEOUT_SECONDS", 0.05)
    reason = "probe took over 0.05 s"
    assert known.find(DeviceType("npu")).reason == reason
    assert known.find(DeviceType("good")).devices
    (row,) = [row for row in known.plugins if row.name == "zzz"]
    assert (row.status, row.detail) == ("unavailable", f"npu: {reason}")
    (row,) = [row for row in device_rows(known) if row["device"] == "npu"]
    assert (row["status"], row["reason"]) == ("unavailable", reason)
    with pytest.raises(BackendUnavailable, match=f"^npu:0: {reason}$"):
        make_backend("npu", known)


def test_ctrl_c_is_not_a_broken_plugin(site):
    site.add("zzz", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.load()


def test_a_failed_plugin_contributes_nothing(site):
    site.add(
        "zzz",
        "from inl.plugin import hookimpl\n"
        "@hookimpl\ndef inl_register_backends(register): register('npu', 'm:C')\n"
        "@hookimpl\ndef inl_register_models(register): 1 / 0\n",
    )
    known = site.load()
    assert known.backend("npu") is None
    assert "zzz" in known.why_absent("npu")


@pytest.fixture
def conflict(site):
    """Two plugins that serve npu; the first by name is used."""
    for name in ("beta", "alpha"):
        body = "register('npu', 'inl.backend.reference:ReferenceBackend')"
        site.add(name, backends(body), entry="npu")
    return site.load()


CONFLICT = (
    "npu is served by plugin npu (alpha 1.0), which is used, and by plugin npu "
    f"(beta 1.0); to keep one: {pip_command('uninstall')} alpha, or: "
    f"{pip_command('uninstall')} beta"
)


def test_two_plugins_for_one_device_type_are_in_conflict(conflict):
    rows = [row for row in conflict.plugins if row.name == "npu"]
    assert [(row.distribution, row.status, row.detail) for row in rows] == [
        ("alpha", "conflict", CONFLICT),
        ("beta", "conflict", CONFLICT),
    ]
    shown = [row for row in device_rows(conflict) if row["device"].startswith("npu")]
    assert [(row["status"], row["reason"]) for row in shown] == [
        ("ready", None),
        ("conflict", CONFLICT),
    ]


def test_opening_a_device_in_conflict_warns(conflict, caplog):
    device_selection._log.cache_clear()
    assert make_backend("npu:0", conflict)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", CONFLICT)


def test_a_module_in_conflict_is_removed_from_the_variable(good, row_of):
    good.module("good_too", backends("register('good', 'm:C')"))
    detail = row_of(good.load("good_too"), "good_too").detail
    line = pip_command("uninstall")
    assert detail.endswith(f"{line} good, or: remove good_too from INL_PLUGINS")
