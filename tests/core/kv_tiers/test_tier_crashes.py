"""Engines over files that crashes, disks and others have damaged: no wrong token.

Whatever happened to the files, each text is that of an engine without tiers, and the
log has one line of it.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from inl.engine.core import EngineCore
from inl.errors import ProtocolError
from inl.kv_tiers import disk_tier
from inl.kv_tiers.disk_tier import DiskTier
from inl.kv_tiers.record import LENGTH, SIGNATURE, BadRecord, Identity
from inl.kv_tiers.tiers import BlockTiers, Costs
from inl.protocol.wire_arrays import read_contents
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from waiting import until

LIMITS = Limits(3, (1100,), 4, 1080, 1000, depth=2)
NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount"]


class AlwaysPays(Costs):
    """Loads whenever it can: what a clock says must not decide a test."""

    def pays(self, blocks, tokens):
        return True


def prompt(number, tokens=60):
    return [(7 * at + 13 * number) % 991 for at in range(tokens)]


def core_of(folder=None):
    """Return an engine core, and its tiers over a folder if there is one."""
    runner = HashRunner(LIMITS)
    config = SchedulerConfig(token_budget=256, model_digest="model")
    if folder is None:
        return EngineCore(runner, config), None
    identity = Identity("model", "int32", runner.cache_layout.groups)
    disk = DiskTier(Path(folder), 1 << 26, identity)
    tiers = BlockTiers(AlwaysPays(), disk=disk)
    return EngineCore(runner, config, tiers=tiers), tiers


def answer(core, ids):
    request = Request(ids, max_tokens=4)
    core.add(request)
    while core.has_work:
        core.step()
    return request.output_ids, request.cached_tokens


def alone(ids):
    return answer(core_of()[0], ids)[0]


def closed(core, tiers):
    core.flush_tiers()
    tiers.close()


def damage(path, random, kind):
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    else:
        del data[random.randrange(len(data)) :]
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_1000_damaged_records_are_computed_again(tmp_path, caplog, kind):
    ids, random = prompt(1, 4005), Random(11)
    core, tiers = core_of(tmp_path / "kv")
    wanted = answer(core, ids)[0]
    assert wanted == alone(ids)
    closed(core, tiers)
    for path in (tmp_path / "kv").glob("*.kv"):
        damage(path, random, kind)
    core, tiers = core_of(tmp_path / "kv")
    assert answer(core, ids) == (wanted, 0)
    assert tiers.disk.counts["damaged"] == 1001
    assert len(caplog.records) == 1
    assert "is damaged" in caplog.text
    closed(core, tiers)
    core, tiers = core_of(tmp_path / "kv")  # they were written again
    assert answer(core, ids) == (wanted, 4004)
    closed(core, tiers)


def test_records_that_are_not_checked_are_found(tmp_path, monkeypatch):
    """These tests can fail: a changed bit in what is read changes the text."""
    ids, random = prompt(1, 405), Random(11)
    core, tiers = core_of(tmp_path / "kv")
    wanted = answer(core, ids)[0]
    closed(core, tiers)
    for path in (tmp_path / "kv").glob("*.kv"):
        damage(path, random, "flip")
    monkeypatch.setattr(disk_tier, "decoded", unchecked)
    core, tiers = core_of(tmp_path / "kv")
    assert answer(core, ids)[0] != wanted
    closed(core, tiers)


def unchecked(_secret, _own, data):
    """Return the contents of a record without its signature."""
    start = SIGNATURE + LENGTH.size
    size = LENGTH.unpack_from(data, SIGNATURE)[0]
    try:
        return read_contents(data[start + size :])
    except ProtocolError as error:
        raise BadRecord("damaged", str(error)) from None


def test_one_damaged_record_in_the_middle_keeps_those_before_it(tmp_path):
    ids, random = prompt(2, 403), Random(12)
    core, tiers = core_of(tmp_path / "kv")
    wanted = answer(core, ids)[0]
    closed(core, tiers)
    paths = sorted((tmp_path / "kv").glob("*.kv"))
    for path in random.sample(paths, 20):
        core, tiers = core_of(tmp_path / "kv")
        damage(path, random, "flip")
        found, cached = answer(core, ids)
        assert (found, tiers.disk.counts["damaged"]) == (wanted, 1)
        assert cached < 400
        closed(core, tiers)


WRITER = """
import sys
sys.path[:0] = {path!r}
from test_tier_crashes import answer, core_of, prompt
number = 0
while True:
    core, tiers = core_of({folder!r})
    print("begun", flush=True)
    for _ in range(3):
        number += 1
        answer(core, prompt(number % 40))
    core.flush_tiers()
    tiers.close()
"""


def test_an_engine_that_is_killed_leaves_no_wrong_token(tmp_path, caplog, depth):
    """At random points: when a random number of names has been seen in the folder."""
    here, random = str(Path(__file__).parent), Random(4)
    folder = tmp_path / "kv"
    code = WRITER.format(path=[here, *sys.path], folder=str(folder))
    wanted = [alone(prompt(number)) for number in range(40)]
    cached = 0
    for _ in range(depth(3, 10, 60)):
        shutil.rmtree(folder, ignore_errors=True)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"begun\n"
        least = random.randint(1, 120)
        until(lambda least=least: len(list(folder.glob("*.kv*"))) >= least)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        core, tiers = core_of(folder)
        for number in range(40):
            found, hits = answer(core, prompt(number))
            assert found == wanted[number]
            cached += hits
        assert set(tiers.disk.counts) <= {"written", "missing"}
        tiers.close()
    assert cached > 0
    assert caplog.records == []


def can_mount():
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    command = [*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(
    not can_mount(), reason="mounts no file system of its own"
)

ON_DISK = """
import json, logging, subprocess, sys
sys.path[:0] = {path!r}
from test_tier_crashes import answer, closed, core_of, prompt
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("inl").addHandler(handler)
def mount(*words):
    subprocess.run(["mount", *words, {folder!r}], check=True)
mount("-t", "tmpfs", "-o", "size={size}", "tmpfs")
core, tiers = core_of({folder!r})
found = [answer(core, prompt(number)) for number in range({first})]
closed(core, tiers)
if {read_only}:
    mount("-o", "remount,ro")
core, tiers = core_of({folder!r})
found += [answer(core, prompt(number)) for number in range(20)]
closed(core, tiers)
print(json.dumps([found, lines, tiers.disk.counts["written"]]))
"""


def on_disk(tmp_path, **fields):
    folder = tmp_path / "disk"
    folder.mkdir()
    here = str(Path(__file__).parent)
    code = ON_DISK.format(path=[here, *sys.path], folder=str(folder), **fields)
    done = subprocess.run(
        [*NAMESPACES, sys.executable, "-c", code], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    found, lines, written = json.loads(done.stdout)
    numbers = [*range(fields["first"]), *range(20)]
    assert [ids for ids, _ in found] == [alone(prompt(number)) for number in numbers]
    return sum(cached for _, cached in found), lines, written


@needs_mount
def test_a_full_disk_is_said_once_and_still_read(tmp_path):
    cached, lines, _ = on_disk(tmp_path, size="200k", first=20, read_only=False)
    assert 0 < cached < 20 * 56
    # One of each engine.
    assert len(lines) == 2
    assert all("No space left" in line for line in lines)


@needs_mount
def test_a_read_only_disk_is_said_once_and_still_read(tmp_path):
    cached, lines, written = on_disk(tmp_path, size="9m", first=4, read_only=True)
    assert (cached, written) == (4 * 56, 0)
    (line,) = lines
    assert "Read-only file system" in line
