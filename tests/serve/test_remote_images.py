"""Images at addresses: which hosts are asked, and how much they may answer."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from http_servers import HashServer
from inl.errors import RequestError
from inl.serve import remote_images
from inl.serve.api_error import ApiError
from inl.serve.job import Conversation, Job
from inl.serve.remote_images import ImageFetcher, RemoteImage, is_public

FILE = b"a file"


class Host(BaseHTTPRequestHandler):
    """A host of images, and of what else an address may lead to."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["host"]))
        with suppress(OSError):
            getattr(self, "do_" + self.path.strip("/").partition("?")[0])()

    def do_image(self):
        self._answer(200, FILE)

    def do_missing(self):
        self._answer(404, b"no")

    def do_moved(self):
        self._answer(302, b"", "/image")

    def do_loop(self):
        self._answer(301, b"", "/loop")

    def do_metadata(self):
        self._answer(302, b"", "http://169.254.169.254/latest/meta-data")

    def do_file(self):
        self._answer(302, b"", "file:///etc/passwd")

    def do_endless(self):
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(1 << 20))

    def do_slow(self):
        self.send_response(200)
        self.end_headers()
        while not self.server.ended.wait(0.05):
            self.wfile.write(b"a")

    def do_held(self):
        assert self.server.released.wait(300)
        self._answer(200, FILE)

    def do_slowhead(self):
        while not self.server.ended.wait(0.05):
            self.wfile.write(b"H")

    def _answer(self, status, body, location=None):
        self.send_response(status)
        if location is not None:
            self.send_header("location", location)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.daemon_threads, server.asked, server.ended = True, [], threading.Event()
    server.released = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def public(monkeypatch):
    """This host's network is as good as a public one."""
    monkeypatch.setattr(remote_images, "is_public", lambda text: text == "127.0.0.1")


def name_of(host):
    return f"127.0.0.1:{host.server_port}"


def conversation(*urls):
    parts = [{"type": "text", "text": "See"}]
    parts += [
        {"type": "image", "image": RemoteImage(url, f"messages[0].content[{at}]")}
        for at, url in enumerate(urls)
    ]
    return Conversation([{"role": "user", "content": parts}])


def fetched(hosts, *urls):
    """The files at addresses."""
    job = Job(None, [conversation(*urls)], {})
    job = asyncio.run(ImageFetcher(hosts).completed(job))
    return [part["image"] for part in job.prompts[0].messages[0]["content"][1:]]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1",
        "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1",
        "fd00:ec2::254", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1",
        "2001::1",
    ],
)  # fmt: skip
def test_addresses_of_private_networks(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"]
)
def test_addresses_of_the_public_network(address):
    assert is_public(address)


def test_files_of_listed_hosts(host, public):
    name = name_of(host)
    urls = [f"http://{name}/image?a=1", f"HTTP://{name}/moved"]
    assert fetched([name], *urls) == [FILE, FILE]
    assert host.asked[-3:] == [("/image?a=1", name), ("/moved", name), ("/image", name)]


def test_jobs_without_addresses_are_as_they_are():
    job = Job(None, ["a", [1], conversation()], {})
    assert asyncio.run(ImageFetcher(["a"]).completed(job)) is job


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing", "status 404"),
        ("loop", "more than 3 redirections"),
        ("metadata", "fetches none of host '169.254.169.254'"),
        ("file", "accepts http:// and https://"),
    ],
)
def test_answers_that_are_no_file(host, public, path, reason):
    with pytest.raises(ApiError, match=reason) as found:
        fetched([name_of(host)], f"http://{name_of(host)}/{path}")
    assert found.value.status == 400
    assert found.value.param == "messages[0].content[0]"
    assert found.value.message.startswith("messages[0].content[0]: ")


def test_redirections_to_listed_hosts_of_private_networks(host, public):
    hosts = [name_of(host), "169.254.169.254"]
    with pytest.raises(ApiError, match="in a private network"):
        fetched(hosts, f"http://{name_of(host)}/metadata")


@pytest.mark.parametrize("path", ["slow", "slowhead"])
def test_time_is_bounded(host, public, monkeypatch, path):
    monkeypatch.setattr(remote_images, "SECONDS", 0.5)
    with pytest.raises(ApiError, match=r"no answer in 0\.5 s"):
        fetched([name_of(host)], f"http://{name_of(host)}/{path}")


def test_bytes_are_bounded(host, public, monkeypatch):
    for name in ("SECONDS", "REQUEST_SECONDS"):
        monkeypatch.setattr(remote_images, name, 300.0)
    with pytest.raises(ApiError, match="more than 33554432 bytes"):
        fetched([name_of(host)], f"http://{name_of(host)}/endless")
    # All images of a request have one bound too.
    monkeypatch.setattr(remote_images, "REQUEST_BYTES", 2 * len(FILE))
    url = f"http://{name_of(host)}/image"
    assert fetched([name_of(host)], url, url) == [FILE] * 2
    with pytest.raises(ApiError, match=r"content\[2\].*more than 0 bytes"):
        fetched([name_of(host)], url, url, url)


def test_many_images_are_refused_before_any_is_fetched(host, public):
    asked = len(host.asked)
    with pytest.raises(RequestError, match="found 257, accepts at most 256"):
        fetched([name_of(host)], *[f"http://{name_of(host)}/image"] * 257)
    assert len(host.asked) == asked


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://other/image", "fetches none of host 'other'"),
        ("http://listed.other/image", "none of host 'listed.other'"),
        ("http://listed:81/image", "none of host 'listed:81'"),
        ("http://listed@other/image", "accepts http://"),
        ("http://a:b@listed/image", "accepts http://"),
        ("http://listed:x/image", "Port"),
        ("http://[::1/image", "Invalid IPv6"),
        ("http:///image", "fetches none of host ''"),
        ("ftp://listed/image", "accepts http://"),
        ("http://l\u0456sted/image", "accepts http://"),
    ],
)
def test_hosts_that_are_not_listed(monkeypatch, url, reason):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(ApiError, match=reason):
        fetched(["listed"], url)


def test_names_of_private_addresses(monkeypatch):
    """A name that has a public address too may resolve to the other one later."""
    answers = [(2, 1, 6, "", (each, 80)) for each in ("8.8.8.8", "169.254.169.254")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    monkeypatch.setattr(socket, "create_connection", None)
    for url in ("http://listed/image", "https://listed/image"):
        with pytest.raises(ApiError, match="in a private network"):
            fetched(["listed"], url)


def test_the_connection_goes_to_the_address_that_was_checked(host, monkeypatch):
    """The name is resolved once: a second answer would be another host's."""
    answers = iter(["8.8.8.8", "169.254.169.254"])
    resolve, connect, asked = socket.getaddrinfo, socket.create_connection, []

    def resolved(name, *args, **options):
        if name != "listed":
            return resolve(name, *args, **options)
        return [(2, 1, 6, "", (next(answers), 80))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)

    def connected(address, timeout):
        asked.append(address)
        return connect(("127.0.0.1", host.server_port), timeout)

    monkeypatch.setattr(socket, "create_connection", connected)
    assert fetched(["listed"], "http://listed/image") == [FILE]
    assert asked == [("8.8.8.8", 80)]
    assert host.asked[-1] == ("/image", "listed")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "URL"}}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "URL"}]}]}),
        ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "URL"}}]}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "URL"}}]}]}),
    ],
)  # fmt: skip
def test_the_server_refuses_addresses_in_each_dialect(host, path, body):
    def replaced(value):
        if isinstance(value, dict):
            return {name: replaced(each) for name, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return f"http://{name_of(host)}/image" if value == "URL" else value

    asked = len(host.asked)
    for hosts, reason in (
        ((), "this server fetches none"),
        (("other",), "fetches none of host"),
        ((name_of(host),), "in a private network"),
    ):
        with HashServer(image_hosts=hosts) as server:
            status, _, answer = server.send("POST", path, replaced(body))
        assert status == 400
        assert reason in str(answer)
    assert len(host.asked) == asked


def test_a_slow_host_delays_no_other_request(host, public, monkeypatch):
    for name in ("SECONDS", "REQUEST_SECONDS"):
        monkeypatch.setattr(remote_images, name, 300.0)
    parts = [
        {"type": "image_url", "image_url": {"url": f"http://{name_of(host)}/held"}}
    ]
    slow = {"messages": [{"role": "user", "content": parts}]}
    with HashServer(image_hosts=(name_of(host),)) as server:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(
                server.send("POST", "/v1/chat/completions", slow)
            )
        )
        asked = len(host.asked)
        thread.start()
        while len(host.asked) == asked:
            time.sleep(0.01)
        status, _, _ = server.send(
            "POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}
        )
        assert status == 200
        assert not answers
        host.released.set()
        thread.join()
    assert answers[0][0] == 400
