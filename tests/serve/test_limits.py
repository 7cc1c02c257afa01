"""Clients that send or read slowly, too much or nothing: each wait has an end.

Limits are short, so that clients reach them soon; no test fails on a busy machine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import ExitStack

import pytest

from http_servers import HashServer
from inl.errors import RequestError
from inl.serve import connections, http_server
from inl.serve.http_server import check_settings, connection_limit, loop_factory
from inl.serve.settings import ServerConfig
from waiting import is_running, until

TEXT = "/v1/completions"
HOST = b"host: localhost\r\n"
KEYS = {"api_keys": ("key",)}
ENDLESS = 64 << 20
"""Bytes that no server takes of what it refuses."""


@pytest.fixture(scope="module", params=[None, loop_factory()], ids=["asyncio", "uv"])
def loops(request):
    """Factories of the event loops that ``inl serve`` may use."""
    return request.param


@pytest.fixture(scope="module", autouse=True)
def short_drain():
    """What is not read waits for a shorter time than outside tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "DRAIN_SECONDS", 0.5)
        yield


@pytest.fixture(scope="module")
def impatient(loops):
    """A server that waits half a second for requests."""
    with HashServer(receive_seconds=0.5, idle_seconds=0.5, loop_factory=loops) as it:
        yield it


@pytest.fixture(scope="module")
def patient(loops):
    """A server that waits longer than a test takes, and needs a key."""
    with HashServer(receive_seconds=3600, loop_factory=loops, **KEYS) as server:
        yield server


def connect(server, receive_bytes=None):
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(300)
    client.connect((host, int(port)))
    return client


def read_all(client):
    """Return what a connection sends until it ends."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        """The server has closed it with data on the way."""
    return b"".join(parts)


def ended_by_reset(client):
    """Whether a connection is closed without all that was sent to it."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return False


def status_of(answer):
    return int(answer.split(b" ", 2)[1]) if answer else None


def trickle(client, data):
    """Send a byte at a time until there is an answer, and return all of it."""
    for at in range(len(data)):
        if select.select([client], [], [], 0.02)[0]:
            return read_all(client)
        try:
            client.sendall(data[at : at + 1])
        except ConnectionError:
            return read_all(client)
    raise AssertionError(f"no answer to {len(data)} bytes")


def slow_answer(server, head, data):
    """Return the answer to a head and data that arrive a byte at a time.

    A connection whose first byte comes too late, of a busy machine, gets none.
    """
    for _ in range(20):
        with connect(server) as client:
            client.sendall(head)
            if answer := trickle(client, data):
                return answer
    raise AssertionError("connections are closed without an answer")


def push(client, start, part):
    """Send a part again and again; return the bytes sent, and the answer.

    Ends once the server takes no more, or with more than it may take.
    """
    client.sendall(start)
    client.setblocking(False)
    sent, answer, ended = 0, b"", False
    while sent < ENDLESS and not ended:
        readable, writable, _ = select.select([client], [client], [], 60)
        assert readable or writable, "the connection neither ends nor goes on"
        try:
            if readable:
                found = client.recv(1 << 16)
                answer += found
                ended = not found and not writable
            if writable:
                sent += client.send(part)
        except ConnectionError:
            ended = True
            client.settimeout(300)
            answer += read_all(client)  # what came before
    return sent, answer


def post(path, body, *headers, length=None):
    """Return the bytes of a request."""
    lines = [f"POST {path} HTTP/1.1\r\n".encode(), HOST, *headers]
    size = len(body) if length is None else length
    return b"".join([*lines, b"content-length: %d\r\n\r\n" % size, body])


# Slow clients


def test_headers_that_arrive_slowly_are_answered_408(impatient):
    answer = slow_answer(impatient, b"G", b"ET /health HTTP/1.1\r\nx: " + b"a" * 60_000)
    assert status_of(answer) == 408
    assert b"--receive-seconds" in answer


@pytest.mark.parametrize("data", [b"", b"\r\n"])
def test_a_connection_without_a_request_is_closed(impatient, data):
    with connect(impatient) as client:
        client.sendall(data)
        assert read_all(client) == b""


def test_a_connection_is_closed_some_time_after_its_last_request(loops):
    options = {"receive_seconds": 3600, "idle_seconds": 0.5, "loop_factory": loops}
    with HashServer(**options) as server, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert status_of(read_all(client)) == 200


@pytest.mark.parametrize("path", [TEXT, "/tokenize", "/v1/embeddings", "/health"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_arrives_slowly_is_answered_408(impatient, path, is_chunked):
    head = post(path, b"", length=60_000)
    data = b"x" * 60_000
    if is_chunked:
        head = head.replace(b"content-length: 60000", b"transfer-encoding: chunked")
        data = b"1\r\nx\r\n" * 10_000
    answer = slow_answer(impatient, head, data)
    # Of a path that reads no body, the answer comes at once.
    assert status_of(answer) == (405 if path == "/health" else 408)
    assert b"connection: close" in answer
    impatient.wait_idle()


def test_half_bodies_take_no_place_from_others(loops):
    with ExitStack() as stack:
        server = stack.enter_context(HashServer(loop_factory=loops))
        for path in ("/tokenize", "/detokenize", "/v1/embeddings", TEXT):
            for _ in range(70):
                client = stack.enter_context(connect(server))
                client.sendall(post(path, b"{", length=1000))
        ask = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}
        for path, body in (ask | {TEXT: {"prompt": "a", "max_tokens": 1}}).items():
            assert server.send("POST", path, body)[0] == 200
        assert server.send("POST", "/v1/embeddings", {"input": []})[0] == 400


# Too many bytes, of clients without a key


HEAD = b"POST /v1/completions HTTP/1.1\r\n" + HOST
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
FLOODS = {
    "lines": (HEAD, b"x: " + b"a" * 300 + b"\r\n", 431),
    "short lines": (HEAD, b"x: a\r\n", 431),
    "one header": (HEAD + b"x: ", b"a" * 50_000, 431),
    "one name": (HEAD, b"a" * 50_000, 431),
    "path": (b"GET /", b"a" * 50_000, 431),
    "empty lines": (b"", b"\r\n" * 20_000, 431),
    "body": (post(TEXT, b"", length=4 << 20), b"a" * 50_000, 401),
    "chunks": (CHUNKED, b"c350\r\n" + b"a" * 50_000 + b"\r\n", 401),
    "extension": (CHUNKED + b"1;", b"a" * 50_000, 401),
    "trailers": (CHUNKED + b"0\r\n", b"x: " + b"a" * 300 + b"\r\n", 401),
}


@pytest.mark.parametrize("name", FLOODS)
def test_what_has_no_end_is_refused_and_not_taken(patient, name):
    start, part, status = FLOODS[name]
    with connect(patient) as client:
        sent, answer = push(client, start, part)
    assert sent < ENDLESS
    # Of trailers, the limit can be reached before the key is checked.
    assert status_of(answer) in (status, 431)
    assert b"connection: close" in answer
    assert patient.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("name", ["trailers", "extension"])
def test_the_framing_of_a_body_has_a_limit(loops, name):
    """Also of clients that may send a body."""
    start, part, _ = FLOODS[name]
    with HashServer(receive_seconds=3600, loop_factory=loops) as server:
        with connect(server) as client:
            sent, _ = push(client, start, part)
        assert sent < ENDLESS
        server.wait_idle()


@pytest.mark.parametrize("parts", [1, 7, 1000])
def test_headers_below_the_limit_are_accepted_however_they_are_divided(patient, parts):
    value = b"a" * ((64 << 10) - 300)
    data = b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + value + b"\r\n"
    data += b"connection: close\r\n\r\n"
    size = -(-len(data) // parts)
    with connect(patient) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), size):
            client.sendall(data[at : at + size])
        assert status_of(read_all(client)) == 200


def test_a_chunked_body_of_small_parts_is_accepted(patient):
    body = json.dumps({"prompt": "a" * 3000, "max_tokens": 1}).encode()
    head = CHUNKED.replace(HOST, HOST + b"authorization: Bearer key\r\n")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connect(patient) as client:
        client.sendall(head + chunks)
        # The prompt is too long, so it was read.
        assert status_of(client.recv(1 << 16)) in (200, 400)


def test_a_refusal_of_a_whole_request_keeps_the_connection(patient):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    last = (b"x-api-key: key\r\n", b"connection: close\r\n")
    with connect(patient) as client:
        # In one part: a body that comes later than the answer ends the connection.
        client.sendall(post(TEXT, body) + post(TEXT, body, *last))
        first, _, second = read_all(client).rpartition(b"HTTP/1.1 ")
    assert (status_of(first), second[:3]) == (401, b"200")
    assert b"connection: close" not in first


@pytest.mark.parametrize("count", [10, 64, 1000])
def test_pipelined_requests_are_answered_one_after_another(patient, count):
    request = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    with connect(patient) as client:
        last = request.replace(HOST, HOST + b"connection: close\r\n")
        client.sendall(request * count + last)
        assert read_all(client).count(b"HTTP/1.1 200") == count + 1


def test_requests_behind_one_that_is_computed_have_a_limit(patient):
    body = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
    first = post(TEXT, body, b"authorization: Bearer key\r\n")
    request = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    with patient.paused(), connect(patient) as client:
        client.sendall(first + request * 1000)
        assert read_all(client).count(b"HTTP/1.1 200") == 0
    patient.wait_idle()


def test_all_pipelined_requests_end_with_their_connection(patient):
    """The one that is being answered, too, behind which others wait."""
    fields = {"prompt": [1], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = b"POST " + TEXT.encode() + b" HTTP/1.1\r\n" + HOST
    head += b"authorization: Bearer key\r\ncontent-type: application/json\r\n"
    with patient.paused() as gate:
        with connect(patient) as client:
            length = b"content-length: %d\r\n\r\n" % len(body)
            client.sendall(head + length + body)
            client.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
            patient.wait_submitted(1)
        until(lambda: not patient.admission.open)
        del gate
    assert patient.server.models.default._health.problem is None


def test_a_pipeline_that_never_begins_leaves_no_cycle(patient):
    """Thousands of them would be work for the garbage collector, on the event loop."""
    body = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
    first = post(TEXT, body, b"authorization: Bearer key\r\n")
    others = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    state = patient.server._http._server.server_state
    patient.wait_idle()
    until(lambda: not state.connections)
    gc.collect()
    gc.disable()
    try:
        with connect(patient) as client, patient.paused():
            client.sendall(first + others * 10)
            until(lambda: any(each.pipeline for each in state.connections))
            (connection,) = state.connections
            ended = weakref.ref(connection.pipeline[0][0])
            del connection
            client.close()
            until(lambda: not state.connections)
        patient.wait_idle()
        until(lambda: ended() is None)
    finally:
        gc.enable()


def test_a_refused_pipeline_is_no_fault_of_the_server(patient, caplog):
    fields = {"prompt": [1], "max_tokens": 2}
    body = json.dumps(fields).encode()
    head = b"POST " + TEXT.encode() + b" HTTP/1.1\r\n" + HOST
    head += b"authorization: Bearer key\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(4):
        with connect(patient) as client:
            client.sendall(request * 200)
            read_all(client)
    patient.wait_idle()
    assert "Traceback" not in caplog.text
    assert "a test request" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_tls_handshake_has_a_limit(tmp_path, loops):
    file = str(tmp_path / "both.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-subj", "/CN=a"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-keyout", file, "-out", f"{file}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    files = {"certificate": f"{file}.crt", "private_key": file}
    with HashServer(receive_seconds=0.5, loop_factory=loops, **files) as server:
        server.url = server.url.replace("https://", "http://")
        with connect(server) as client:
            assert read_all(client) == b""


# Clients that do not read


MANY = 16
"""Completions whose stream is larger than what the system holds for a socket."""


def stream_body(**options):
    body = {"prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True, "n": MANY}
    return json.dumps(body | {"stream": True, "logprobs": 20} | options).encode()


@pytest.mark.parametrize("frontends", [0, 1])
def test_a_client_that_does_not_read_holds_no_place(loops, frontends):
    options = {"max_batch": MANY, "max_queue": 0, "send_seconds": 3600}
    options |= {"frontends": frontends, "loop_factory": loops}
    with HashServer(**options) as server:
        with connect(server, receive_bytes=2048) as client:
            client.sendall(post(TEXT, stream_body()))
            until(lambda: server.engine and server.engine.stats.rows >= MANY * 900)
            until(lambda: not server.admission.open)
            # Its answer is still being sent: the key's own bound counts it.
            assert server.server.models.clients["anonymous"] == MANY
            body = {"prompt": "a", "max_tokens": 2, "n": MANY}
            assert server.send("POST", TEXT, body)[0] == 200
        until(lambda: not server.server.models.clients["anonymous"])
        server.wait_idle()


@pytest.mark.parametrize("frontends", [0, 1])
def test_a_client_that_does_not_read_is_disconnected(loops, frontends):
    """Its request ends, though the engine has not finished it."""
    options = {"max_batch": MANY, "frontends": frontends, "loop_factory": loops}
    with HashServer(send_seconds=0.5, **options) as server:
        with server.paused() as gate, connect(server, receive_bytes=2048) as client:
            client.sendall(post(TEXT, stream_body()))
            until(lambda: server.admission.open == MANY)
            gate.hold_after(850)  # of 900, so that only the limit ends it
            until(lambda: not server.admission.open)
            # Its end has come, and what was not sent is not sent any more.
            assert ended_by_reset(client)
        server.wait_idle()


def test_a_late_reader_gets_its_whole_answer(loops):
    """It begins to read once the engine has finished."""
    options = {"max_batch": MANY, "send_seconds": 300, "loop_factory": loops}
    with HashServer(**options) as server:
        with connect(server, receive_bytes=1 << 16) as client:
            client.sendall(post(TEXT, stream_body(), b"connection: close\r\n"))
            until(lambda: server.engine and server.engine.stats.rows >= MANY * 900)
            answer = read_all(client)
        assert answer.count(b'"finish_reason":"length"') == MANY
        assert b"data: [DONE]" in answer


# Too many connections


def test_idle_connections_make_room_for_new_ones(loops, caplog):
    options = {"max_connections": 8, "receive_seconds": 3600}
    with ExitStack() as stack:
        server = stack.enter_context(HashServer(**options, loop_factory=loops))
        clients = [stack.enter_context(connect(server)) for _ in range(40)]
        for _ in range(5):
            assert server.send("GET", "/health")[0] == 200
        assert read_all(clients[0]) == b"", "the oldest was closed"
        lines = [each.getMessage() for each in caplog.records]
        assert sum("--max-connections" in line for line in lines) == 1


def test_connections_beyond_the_limit_are_refused(loops):
    options = {"max_connections": 8, "receive_seconds": 3600}
    with ExitStack() as stack:
        server = stack.enter_context(HashServer(**options, loop_factory=loops))
        clients = [stack.enter_context(connect(server)) for _ in range(8)]
        for client in clients:
            client.sendall(post(TEXT, b"{", length=1000))
        found = server.server._http._connections
        until(lambda: found.count == 8 and not found.idle)
        with connect(server) as refused:
            answer = read_all(refused)
        assert status_of(answer) == 503
        assert b"retry-after: " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == (
            "too_many_connections"
        )
        clients[0].close()
        until(lambda: found.count < 8)
        assert server.send("GET", "/health")[0] == 200


def test_few_connections_are_kept_for_refused_clients_that_send_on(loops, monkeypatch):
    monkeypatch.setattr(connections, "MAX_DRAINING", 3)
    monkeypatch.setattr(connections, "DRAIN_SECONDS", 3600.0)
    with ExitStack() as stack:
        options = {"receive_seconds": 3600}
        server = stack.enter_context(HashServer(**options, loop_factory=loops))
        found = server.server._http._connections
        clients = []
        for _ in range(8):
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(HEAD + b"x: " + b"a" * 100_000)
            assert status_of(clients[-1].recv(1 << 16)) == 431
        assert len(found.draining) == 3
        for client in clients[:5]:
            read_all(client)  # ends
        until(lambda: found.count == 3)
        assert server.send("GET", "/health")[0] == 200
        for each in list(found.draining):  # the server's end waits for them
            each.loop.call_soon_threadsafe(each.evict)


def test_a_connection_reads_few_bytes_at_once(monkeypatch):
    """Of asyncio: uvloop always reads up to 256 KiB."""
    sizes, receive = [], connections.Connection.data_received

    def received(self, data):
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(connections.Connection, "data_received", received)
    with HashServer() as server, connect(server) as client:
        client.sendall(post(TEXT, b"a" * (4 << 20)))
        assert status_of(client.recv(1 << 16)) == 400
    assert connections.READ_BYTES // 2 < max(sizes) <= connections.READ_BYTES


def test_the_limit_of_connections_leaves_other_files_room(monkeypatch):
    limits = []
    for files in (100, 1024, 4096, 1 << 20, None):
        monkeypatch.setattr(http_server, "open_files", lambda files=files: files)
        limits.append(connection_limit(ServerConfig()))
    assert limits == [50, 512, 2048, 10_000, 10_000]
    monkeypatch.setattr(http_server, "open_files", lambda: 1024)
    assert connection_limit(ServerConfig(max_connections=7)) == 7
    with pytest.raises(RequestError, match=r"found 5000, .* 1024 open files"):
        check_settings(ServerConfig(port=0, max_connections=5000))


@pytest.mark.parametrize(
    "name", ["receive_seconds", "send_seconds", "idle_seconds", "frontend_seconds"]
)
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_each_wait_has_a_limit(name, value):
    with pytest.raises(RequestError, match=name.replace("_", " ")):
        ServerConfig(**{name: value})


# Front-ends


def test_a_front_end_that_is_stopped_is_replaced():
    with HashServer(frontends=2, frontend_seconds=3) as server:
        frontends = server.server.frontends
        first, other = frontends.processes
        other._seconds = 3600  # it may be slow
        stopped = first.pid
        os.kill(stopped, signal.SIGSTOP)
        # Waits for an answer of all front-ends, as after a change of adapters.
        naming = asyncio.run_coroutine_threadsafe(frontends.announce(), server._loop)
        naming.result(300)
        until(lambda: not is_running(stopped))
        first._seconds = 3600
        body = {"prompt": "a", "max_tokens": 1}
        for _ in range(10):  # the system divides them between both sockets
            assert server.send("POST", TEXT, body)[0] == 200
        until(lambda: stopped not in [each.pid for each in frontends.processes])
        server.wait_idle()


def test_a_front_end_ends_with_the_engine_s_process():
    """Also one that waits for its settings."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, theirs:
        fds = (theirs.fileno(), listening.fileno())
        command = [sys.executable, "-m", "inl.serve.frontends.main"]
        command += ["--link", str(fds[0]), "--listen", str(fds[1])]
        process = subprocess.Popen(command, pass_fds=fds)
    ours.close()
    assert process.wait(300) == 0


# Clients of other servers


def test_the_load_client_waits_no_longer_than_it_was_told():
    from inl.serve.load_client import LoadClient

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = LoadClient(url, seconds=0.2)
        sample = asyncio.run(client.measure({}))
        assert sample.error == "no end within 0.2 s"
        with pytest.raises(RequestError, match=r"no answer of /v1/models within 0\.2"):
            asyncio.run(client.model())
