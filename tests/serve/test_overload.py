"""More than a server can do, clients that vanish, and ones that read slowly."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import struct
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from depth import mostly_long
from http_servers import HashServer, hash_engine
from inl.recording.recorder import STEPS
from inl.switch_interval import SHORT_SECONDS
from waiting import until

TOKENS = 8
CLIENTS = 48
PATH = "/v1/completions"
LOGGER = "inl.serve"


@pytest.fixture(scope="module", params=mostly_long([0, 2]))
def slow(request):
    options = {"max_batch": 4, "max_queue": 8, "frontends": request.param}
    with HashServer(seconds=0.002, **options) as server:
        yield server


def body_of(number, **options):
    ids = [number * 7 + at for at in range(20)]
    body = {"prompt": ids, "max_tokens": TOKENS, "seed": number, "ignore_eos": True}
    return {**body, "return_token_ids": True, **options}


def head(body):
    data = json.dumps(body).encode()
    lines = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    return f"{lines}content-length: {len(data)}\r\n\r\n".encode() + data


async def post(server, body):
    """Return status, headers and body of a request on its own connection."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head(body))
    answer = await reader.read(-1)
    writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(rest)


def flood(server, clients, rounds, **options):
    """Return the answers of clients that each send requests one after another."""

    async def client(number, answers):
        for turn in range(rounds):
            which = number * rounds + turn
            answers.append((which, *await post(server, body_of(which, **options))))

    async def run():
        answers = []
        await asyncio.gather(*(client(number, answers) for number in range(clients)))
        return answers

    return asyncio.run(run())


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def twin_tokens(twin, which, **options):
    """Return the tokens of all completions of a body, by an engine of the test."""
    body = body_of(which)
    names = "prompt", "max_tokens", "seed", "ignore_eos"
    options = {**{name: body[name] for name in names}, **options}
    done = twin.generate(options.pop("prompt"), temperature=1.0, **options)
    return [list(each.token_ids) for each in (done, *done.alternatives)]


def test_overload_keeps_the_batch_full_and_refuses_with_retry_after(slow, depth):
    before, rejected = slow.engine.stats, slow.admission.rejected

    def have_arrived():
        return slow.admission.open + slow.admission.rejected - rejected == CLIENTS

    def step_later():
        until(have_arrived)
        slow.wait_submitted(12)
        gate.release()

    with slow.paused() as gate:
        thread = threading.Thread(target=step_later)
        thread.start()
        answers = flood(slow, CLIENTS, 1)
        thread.join()
    stats = slow.engine.stats
    assert stats.rows - before.rows >= 0.75 * 4 * (stats.steps - before.steps)
    assert [status for _, status, _, _ in answers].count(200) == 12
    answers += flood(slow, CLIENTS, depth(2, 19))
    accepted = [each for each in answers if each[1] == 200]
    refused = [each for each in answers if each[1] != 200]
    for _, status, headers, answer in refused:
        assert status == 503
        assert 1 <= int(headers["retry-after"]) <= 60
        assert answer["error"]["type"] == "overloaded_error"
    with hash_engine(4) as twin:
        for which, _, _, answer in accepted:
            assert [tokens(answer)] == twin_tokens(twin, which)
    slow.wait_idle()
    assert slow.admission.rejected - rejected == len(refused)


def resident_bytes():
    """Memory of this process, in which the server runs too."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_overload_takes_no_more_memory_the_longer_it_lasts():
    with HashServer(max_batch=4, max_queue=8) as server:
        flood(server, CLIENTS, 25)
        growth = []
        # What other threads allocate meanwhile does not grow each time.
        while not growth or growth[-1] >= 3 << 20:
            assert len(growth) < 5, growth
            before = resident_bytes()
            for _ in range(3):
                flood(server, CLIENTS, 25)
            # 3600 requests: 1 KB that each of them leaves would be 3.6 MB.
            growth.append(resident_bytes() - before)
        server.wait_idle()


def live_objects():
    """Number of objects of each of this project's types that the collector knows."""
    gc.collect()
    types = map(type, gc.get_objects())
    return Counter(each for each in types if str(each.__module__).startswith("inl."))


def test_requests_leave_no_objects_once_the_recorder_is_full(depth):
    rounds = depth(2, 20)
    with HashServer(max_batch=4, max_queue=8) as server:
        # The last steps are kept for the message of a failure: first fill their ring.
        while server.engine.stats.steps < STEPS:
            flood(server, 24, 4)
        before = live_objects()
        for _ in range(rounds):
            flood(server, 24, 4)
        # Less than one object of each tenth request.
        most = rounds * 96 / 10
        # Connections that are being closed still have some.
        until(lambda: max((live_objects() - before).values(), default=0) <= most)


def test_many_short_requests_all_end(depth):
    options = {"max_tokens": 1, "n": 2}
    with HashServer(max_batch=4, max_queue=64) as server, hash_engine(4) as twin:
        answers = flood(server, 16, depth(12, 50), **options)
        for which, status, _, answer in answers:
            assert status == 200
            found = [each["token_ids"] for each in answer["choices"]]
            assert found == twin_tokens(twin, which, **options)
        server.wait_idle()


def streamed_tokens(text):
    """Return the tokens of a stream, however its steps were sent together."""
    found = []
    for line in text.splitlines():
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            found += choice["token_ids"]
    assert choice["finish_reason"] == "length"
    return found


def open_stream(server, **options):
    """Return a socket on which a long stream has begun."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=300)
    client.sendall(head(body_of(1, stream=True, max_tokens=900, **options)))
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    return client


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_vanishes_frees_its_blocks(slow, is_reset):
    began = slow.engine.stats.steps
    with slow.paused() as gate:
        clients = [open_stream(slow) for _ in range(4)]
        slow.wait_submitted(4)
        gate.hold_after(20)
        assert gate.is_held.wait(300)
        assert slow.used_blocks
        for client in clients:
            if is_reset:  # as the kernel does for a process that was killed
                client.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            client.close()
        until(lambda: not slow.admission.open)
    slow.wait_idle()
    assert slow.engine.stats.steps - began < 30, "they ended before their last token"


def test_a_client_that_does_not_wait_for_its_answer_frees_its_blocks(slow):
    host, port = slow.url.removeprefix("http://").split(":")
    began = slow.engine.stats.steps
    with slow.paused() as gate:
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head(body_of(1, max_tokens=900)))
            slow.wait_submitted(1)
            gate.hold_after(20)
            assert gate.is_held.wait(300)
            assert slow.used_blocks
        until(lambda: not slow.admission.open)
    slow.wait_idle()
    assert slow.engine.stats.steps - began < 30, "it ended before its last token"


def test_slow_readers_and_idle_connections_do_not_delay_the_others(slow, depth):
    clients = [open_stream(slow, logprobs=20) for _ in range(3)]
    host, port = slow.url.removeprefix("http://").split(":")
    idle = depth(100, 500)
    clients += [socket.create_connection((host, int(port))) for _ in range(idle)]
    answers = flood(slow, 1, 10)
    assert [status for _, status, _, _ in answers] == [200] * 10
    for client in clients:
        client.close()
    slow.wait_idle()


async def is_listening(server):
    host, port = server.url.removeprefix("http://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionError:
        return False
    writer.close()
    return True


def test_stopping_loses_no_accepted_answer():
    answers = []
    with HashServer(max_batch=2, max_queue=20, drain_seconds=300) as server:

        async def run():
            with server.paused():
                tasks = [
                    asyncio.create_task(post(server, body_of(number)))
                    for number in range(12)
                ]
                while server.admission.open < 12:
                    await asyncio.sleep(0.005)
                server.stop()
                while await is_listening(server):
                    await asyncio.sleep(0.005)
            answers.extend(await asyncio.gather(*tasks))

        asyncio.run(run())
    assert [status for status, _, _ in answers] == [200] * 12
    assert all(len(tokens(answer)) == TOKENS for _, _, answer in answers)


def test_requests_that_outlast_the_stop_are_ended_without_a_traceback(caplog):
    with HashServer(max_batch=4, drain_seconds=1) as server:

        async def run():
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head(body_of(1, stream=True, max_tokens=900)))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            with server.paused():
                whole = asyncio.create_task(post(server, body_of(2, max_tokens=900)))
                while server.admission.open < 2:
                    await asyncio.sleep(0.005)
                server.stop()
                answer = await whole
                with suppress(ConnectionResetError):
                    assert b"[DONE]" not in await reader.read(-1)
            writer.close()
            return answer

        status, headers, answer = asyncio.run(run())
    assert (status, headers["retry-after"]) == (503, "1")
    assert answer["error"]["code"] == "draining"
    errors = [each for each in caplog.records if each.exc_info or each.name != LOGGER]
    assert not [each.getMessage() for each in errors if each.levelno > logging.INFO]
    assert "2 requests are ended: the server stops, and has waited 1 s" in caplog.text


def test_idle_streams_get_comments():
    with HashServer(max_batch=1, keep_alive_seconds=0.2) as server:
        body = body_of(1, max_tokens=3, stream=True)

        async def run():
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with server.paused():
                writer.write(head(body))
                text = b""
                while text.count(b": keep-alive\n\n") < 3:
                    part = await asyncio.wait_for(reader.read(4096), 300)
                    assert part, text
                    text += part
            text += await reader.read(-1)
            writer.close()
            return text

        text = asyncio.run(run())
    with hash_engine(1) as twin:
        assert [streamed_tokens(text)] == twin_tokens(twin, 1, max_tokens=3)
    assert text.count(b"data: [DONE]") == 1


def test_a_stepping_thread_need_not_wait_long_for_the_interpreter():
    before = sys.getswitchinterval()
    with HashServer(max_batch=2):
        assert sys.getswitchinterval() == pytest.approx(SHORT_SECONDS)
    assert sys.getswitchinterval() == before
