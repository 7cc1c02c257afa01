"""``inl run-batch --replica``: one answer a line, whatever ends in between."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from random import Random

import pytest

from depth import SEED, scaled
from fleets import EngineProcess
from http_servers import hash_engine
from inl.cli.main import main
from waiting import until

ENGINE = {"max_batch": 4, "server": {"max_queue": 1 << 16}}
SLOW = {**ENGINE, "seconds": 0.005}
TOKENS = 6


def body_of(number):
    """Return a request; one of four is sampled."""
    body = {"prompt": [number % 997, number // 997, 5], "max_tokens": TOKENS}
    body |= {"ignore_eos": True, "return_token_ids": True, "seed": number}
    return body | {"temperature": 0 if number % 4 else 0.9}


def write_requests(path, count, **odd):
    """Write requests named 0, 1 and so on; odd: what the bodies of some have more."""
    with path.open("w") as file:
        for number in range(count):
            body = body_of(number) | odd.get(f"no{number}", {})
            line = {"custom_id": str(number), "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def lines_of(path):
    """Yield the answers of a file, each of which is a complete line."""
    with path.open("rb") as file:
        for line in file:
            assert line.endswith(b"\n")
            yield json.loads(line)


def check_answers(path, count, bad=()):
    """Check that each request has one answer, which is that of one engine."""
    seen = bytearray(count)
    with hash_engine(4) as twin:
        for line in lines_of(path):
            number = int(line["custom_id"])
            seen[number] += 1
            if number in bad:
                assert line["response"]["status_code"] == 400
                continue
            assert line["response"]["status_code"] == 200, line
            if number % scaled(1, 1, 50):
                continue  # the twin takes longer than the fleet
            body = body_of(number)
            options = {key: body[key] for key in ("seed", "temperature", "ignore_eos")}
            done = twin.generate(body["prompt"], max_tokens=TOKENS, **options)
            (choice,) = line["response"]["body"]["choices"]
            assert tuple(choice["token_ids"]) == done.token_ids, number
    assert seen == b"\1" * count


def words(requests, answers, engines):
    replicas = itertools.chain(*(("--replica", each.address) for each in engines))
    return ["run-batch", str(requests), str(answers), *replicas]


def test_an_engine_that_is_lost_in_the_middle_changes_no_answer(
    tmp_path, monkeypatch, capsys
):
    requests = write_requests(tmp_path / "in.jsonl", 120, no7={"stop": 7})
    answers = tmp_path / "out.jsonl"
    with EngineProcess(**SLOW) as first, EngineProcess(**SLOW) as second:
        ticks = []

        @contextmanager
        def bar(total, label):
            ticks.append(total)

            def tick():
                ticks.append(1)
                if len(ticks) == 40:
                    first.kill()

            yield tick

        monkeypatch.setattr("inl.cli.run_batch.bar", bar)
        assert main(words(requests, answers, [first, second])) == 2
        assert ticks == [120] + [1] * 120
        check_answers(answers, 120, bad={7})
        assert "1 requests failed" in capsys.readouterr().err
        # The failed line runs again, and a torn one: by the engine that is left.
        write_requests(requests, 120)
        with answers.open("ab") as file:
            file.write(b'{"id": "batch_req_')
        assert main(words(requests, answers, [second])) == 0
        assert "119 answered before, 1 to do" in capsys.readouterr().err
        check_answers(answers, 120)


KILLED = """
import os, signal, sys
from contextlib import contextmanager
from inl.cli import run_batch
from inl.cli.main import main

@contextmanager
def bar(total, label):
    left = int(sys.argv[1])
    def tick():
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    yield tick

run_batch.bar = bar
sys.exit(main(sys.argv[2:]))
"""
"""The command, which is killed after so many answers."""


@pytest.mark.full
@pytest.mark.timeout(scaled(600, 600, 7200))
def test_a_run_that_is_killed_again_and_again_has_one_answer_a_line(tmp_path):
    """Engines are killed too; the command's memory is printed."""
    count, rounds = scaled((200, 3), (200, 3), (100_000, 20))
    options = {**ENGINE, "max_batch": 16} if count > 1000 else SLOW
    requests = write_requests(tmp_path / "in.jsonl", count)
    answers, draw = tmp_path / "out.jsonl", Random(SEED)

    def start(requests, answers, *script):
        script = script or ("-m", "inl")
        return subprocess.Popen(
            [sys.executable, *script, *words(requests, answers, engines)]
        )

    def size():
        return answers.stat().st_size if answers.exists() else 0

    with ExitStack() as stack:
        engines = [stack.enter_context(EngineProcess(**options)) for _ in range(2)]
        addresses = [each.address for each in engines]
        for _ in range(rounds):
            ticks = draw.randrange(2, count // (2 * rounds))
            process, before = start(requests, answers, "-c", KILLED, str(ticks)), size()
            until(lambda before=before: size() > before)
            index = draw.randrange(2)
            engines[index].kill()
            assert process.wait() == -signal.SIGKILL
            again = EngineProcess(**options, address=addresses[index])
            engines[index] = stack.enter_context(again)
            assert engines[index].address == addresses[index]
            with answers.open("ab") as file:  # as a write that was interrupted
                file.write(b'{"id": "batch_req_0", "custom_id'[: draw.randrange(30)])
        memory = peak_bytes(start(requests, answers))
        few = write_requests(tmp_path / "few.jsonl", 100)
        least = peak_bytes(start(few, tmp_path / "few_out.jsonl"))
    check_answers(answers, count)
    print(
        f"{count} lines: {memory / 2**20:.1f} MiB at most, of 100 lines "
        f"{least / 2**20:.1f} MiB"
    )
    # A request takes 17 bytes, 45 while ids are sorted; its line alone is of 190.
    assert memory - least < 64 * count + (8 << 20)


def peak_bytes(process):
    """Wait for the end of a command that succeeds; returns its most memory."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024
