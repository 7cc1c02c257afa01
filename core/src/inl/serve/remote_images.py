"""Images at addresses of listed hosts, fetched before their request is computed.

A client chooses the address, and the server's network may reach what the client cannot:
the metadata service of a cloud, or other programs of the host. So a host must be
listed, all addresses that its name resolves to must be public, and the connection goes
to one that was checked; each redirection is checked in the same way.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urljoin, urlsplit

from inl.engine.prompt_images import without_images
from inl.images.decoding import MAX_BYTES
from inl.serve.api_error import ApiError, unsupported
from inl.serve.job import Conversation

if TYPE_CHECKING:
    from inl.serve.job import Job

SCHEMES: Final = {"http": 80, "https": 443}
"""Schemes, and their ports."""
REDIRECTIONS: Final = (301, 302, 303, 307, 308)
MAX_REDIRECTIONS: Final = 3
SECONDS: Final = 10.0
"""Time to fetch an image, with its redirections."""
REQUEST_SECONDS: Final = 30.0
"""Time to fetch all images of a request."""
REQUEST_BYTES: Final = 64 << 20
"""Bytes of all fetched images of a request."""
THREADS: Final = 4
CHUNK: Final = 1 << 16
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that is to be fetched. where: its place in the request."""

    url: str
    where: str


class Target(NamedTuple):
    """A checked address."""

    host: str
    port: int
    is_encrypted: bool
    path: str
    addresses: tuple[str, ...]


class ImageFetcher:
    """Fetches the images of requests from listed hosts.

    hosts: names, or NAME:PORT for another port than that of the scheme.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._threads: ThreadPoolExecutor | None = None

    async def completed(self, job: Job) -> Job:
        """Return a job with the bytes of its images; raises :class:`ApiError`."""
        if not any(map(_has_remote, job.prompts)):
            return job
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "inl-images")
        loop = asyncio.get_running_loop()
        work = partial(self.fetched, job.prompts)
        return replace(job, prompts=await loop.run_in_executor(self._threads, work))

    def fetched(self, prompts: Sequence[Any]) -> list[Any]:
        """Return prompts with the bytes of their images; raises :class:`ApiError`."""
        deadline, room = time.monotonic() + REQUEST_SECONDS, REQUEST_BYTES
        found: list[Any] = []
        for prompt in prompts:
            if not _has_remote(prompt):
                found.append(prompt)
                continue
            files = []
            for image in _remote_of(prompt):
                end = min(deadline, time.monotonic() + SECONDS)
                files.append(self._fetch(image, end, min(room, MAX_BYTES)))
                room -= len(files[-1])
            each = iter(files)
            messages = [_with_files(message, each) for message in prompt.messages]
            found.append(replace(prompt, messages=messages))
        return found

    def _fetch(self, image: RemoteImage, deadline: float, most: int) -> bytes:
        """Return a file of at most ``most`` bytes."""
        url = image.url
        for _ in range(MAX_REDIRECTIONS + 1):
            target = self._checked(url, image.where)
            try:
                data, location = _get(target, deadline, most)
                if time.monotonic() >= deadline:  # where it looks like the body's end
                    raise TimeoutError
            except (OSError, ValueError, http.client.HTTPException) as error:
                late = time.monotonic() >= deadline
                reason = f"no answer in {SECONDS:g} s" if late else f"{error!s:.80}"
                raise _failed(image, reason) from None
            if data is not None:
                return data
            url = urljoin(url, location)
        raise _failed(image, f"found more than {MAX_REDIRECTIONS} redirections")

    def _checked(self, url: str, where: str) -> Target:
        """Check an address; raises :class:`ApiError`."""
        if not self._hosts:
            raise unsupported(
                where,
                f"found an image at {url!r:.60}; this server fetches none, and accepts "
                "data:image/TYPE;base64,DATA",
            )
        shown = f"found an image at {url!r:.60}; "
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise unsupported(where, f"{shown}{error}") from None
        default = SCHEMES.get(parts.scheme)
        if default is None or parts.username is not None or not host.isascii():
            raise unsupported(where, f"{shown}accepts http:// and https://HOST/PATH")
        listed = host if port in (None, default) else f"{host}:{port}"
        if listed not in self._hosts:
            raise unsupported(
                where,
                f"{shown}this server fetches none of host {listed!r:.60} "
                "(--allow-image-hosts), and accepts data:image/TYPE;base64,DATA",
            )
        addresses = _addresses(host, port or default)
        if not addresses:
            raise unsupported(where, f"{shown}found no address of the host")
        if not all(map(is_public, addresses)):
            raise unsupported(where, f"{shown}its host is in a private network")
        path = parts.path or "/"
        if parts.query:
            path += f"?{parts.query}"
        encrypted = parts.scheme == "https"
        return Target(host, port or default, encrypted, path, addresses)


def is_public(text: str) -> bool:
    """Whether an address is one of the public internet, also inside of another one."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if address.teredo is not None:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _addresses(host: str, port: int) -> tuple[str, ...]:
    """Return the addresses of a host; none if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def _get(target: Target, deadline: float, most: int) -> tuple[bytes | None, str]:
    """Return the body of an answer, or the location of a redirection.

    Raises ``OSError``, ``ValueError`` and ``HTTPException``.
    """
    end = _connected(target, deadline)
    # A host that sends a byte now and then meets no time limit of a single read.
    timer = threading.Timer(max(deadline - time.monotonic(), 0), _shut, [end])
    timer.daemon = True
    timer.start()
    try:
        if target.is_encrypted:
            context = ssl.create_default_context()
            end = context.wrap_socket(end, server_hostname=target.host)
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock = end
        if target.port in SCHEMES.values():
            connection.port = connection.default_port  # not in the header Host
        connection.request("GET", target.path, headers={"Accept": "image/*"})
        with connection.getresponse() as response:
            return _read(response, most)
    finally:
        timer.cancel()
        end.close()


def _connected(target: Target, deadline: float) -> socket.socket:
    """Return a socket that is connected to one of the checked addresses."""
    problem: OSError = TimeoutError("no time is left")
    for address in target.addresses:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        try:
            return socket.create_connection((address, target.port), seconds)
        except OSError as error:
            problem = error
    raise problem


def _read(response: http.client.HTTPResponse, most: int) -> tuple[bytes | None, str]:
    location = response.headers.get("location")
    if response.status in REDIRECTIONS and location is not None:
        return None, location
    if response.status != 200:
        raise ValueError(f"its host answers with status {response.status}")
    data = bytearray()
    while part := response.read(CHUNK):
        data += part
        if len(data) > most:
            raise ValueError(f"found more than {most} bytes")
    return bytes(data), ""


def _shut(end: socket.socket) -> None:
    """End the reads and writes of another thread."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        """It has ended by itself."""


def _failed(image: RemoteImage, reason: str) -> ApiError:
    return ApiError(
        400,
        f"{image.where}: cannot fetch {image.url!r:.60}: {reason}",
        param=image.where,
        code="invalid_image_url",
    )


def _remote_of(prompt: Any) -> list[RemoteImage]:
    """Return the images of a prompt that are to be fetched."""
    if not isinstance(prompt, Conversation):
        return []
    _, images = without_images(prompt.messages)
    return [image for image in images if isinstance(image, RemoteImage)]


def _has_remote(prompt: Any) -> bool:
    return bool(_remote_of(prompt))


def _with_files(message: Mapping[str, Any], files: Any) -> Mapping[str, Any]:
    """Return a message with the next files in place of its remote images."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "image": next(files)}
        if isinstance(part.get("image"), RemoteImage)
        else part
        for part in content
    ]
    return {**message, "content": parts}
