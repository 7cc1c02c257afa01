"""Hostile images to ``inl serve``: refused in each dialect, while memory is flat."""

from __future__ import annotations

import base64
import struct
import sys
import time
import zlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from depth import scaled
from http_clients import HttpClient
from http_servers import ServerProcess
from image_models import picture, tiny_model
from image_servers import png, uri

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc"
)
GROWTH = 24 << 20
"""Bytes by which processes may grow from one round to many: arenas of allocators."""
FINE = {"more data than its size", "a compressed text", "a profile"}
"""Small images around a bomb that need not be read: an answer or a refusal."""
PEAK = 200 << 20
"""Bytes above those of an idle server that a bomb, which is 900 MB of pixels, may take
in all processes together: a body and its images, once each."""


def chunk(kind, data):
    return (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
    )


def squeezed(size):
    """Zeros, compressed a thousandfold."""
    packer, part = zlib.compressobj(9), bytes(1 << 20)
    return b"".join(packer.compress(part) for _ in range(size >> 20)) + packer.flush()


def png_of(width, height, *chunks):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def as_uri(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def cases():
    """(name, addresses or data URIs of a request)."""
    bomb = squeezed(900 << 20)
    photo = png(picture(64, 48))
    return {
        "too many pixels": [as_uri(png_of(17_000, 17_000, chunk(b"IDAT", bomb)))],
        "more data than its size": [as_uri(png_of(8, 8, chunk(b"IDAT", bomb)) + b"x")],
        "a compressed text": [as_uri(png_of(8, 8, chunk(b"zTXt", b"a\0\0" + bomb)))],
        "a profile": [as_uri(png_of(8, 8, chunk(b"iCCP", b"a\0\0" + bomb)))],
        "truncated": [as_uri(photo[:-60])],
        "another type": [as_uri(photo, "image/jpeg")],
        "a page": [as_uri(b"<html><svg/></html>", "image/svg+xml")],
        "noise": [as_uri(bytes(range(256)) * 4096)],
        "10,000 images": [uri(picture(1, 1))] * 10_000,
        "the metadata service": ["http://169.254.169.254/latest/meta-data/"],
        "its name": ["http://metadata.google.internal/computeMetadata/v1/"],
        "its address as a number": ["http://2852039166/"],
        "in IPv6": ["http://[fd00:ec2::254]/latest/meta-data/"],
        "a file": ["file:///proc/self/environ"],
    }


def requests(urls):
    """The request in each dialect: (path, body)."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    turns = [{"role": "user", "content": parts}]
    yield "/v1/chat/completions", {"messages": turns, "max_tokens": 2}
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    turns = [{"role": "user", "content": parts}]
    yield "/v1/responses", {"input": turns, "max_output_tokens": 2}
    blocks = []
    for url in urls:
        head, _, data = url.partition(",")
        kind = head.removeprefix("data:").partition(";")[0]
        source = {"type": "base64", "media_type": kind, "data": data}
        if not url.startswith("data:"):
            source = {"type": "url", "url": url}
        blocks.append({"type": "image", "source": source})
    message = {"role": "user", "content": blocks}
    yield "/v1/messages", {"messages": [message], "max_tokens": 2}


def processes(pid):
    """A process and those that it has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def memory(pid, field="VmRSS"):
    """Bytes of memory of a process and its children: resident, or their peak."""
    total = 0
    for each in processes(pid):
        try:
            text = Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue
        total += sum(
            1024 * int(line.split()[1])
            for line in text.splitlines()
            if line.startswith(field)
        )
    return total


@pytest.mark.full
def test_memory_stays_flat(tmp_path):
    folder = tiny_model("qwen2_5_vl", tmp_path).folder
    options = "--port", "0", "--device", "cpu", "--name", "default"
    with ServerProcess(str(folder), *options, bare=True) as server:
        client, pid = HttpClient(), server.process.pid
        client.url = server.url
        turn = {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": uri(picture(64, 48))}},
        ]}  # fmt: skip
        fine = {"messages": [turn], "max_tokens": 2, "temperature": 0}

        def answered():
            status, _, answer = client.send("POST", "/v1/chat/completions", fine)
            assert status == 200, answer
            return answer["choices"][0]["message"]["content"]

        def refused():
            for name, urls in hostile.items():
                for path, body in requests(urls):
                    status, _, answer = client.send("POST", path, body)
                    if status == 200 and name in FINE:
                        continue
                    said = status, answer.get("error", {}).get("type")
                    refusal = 400, "invalid_request_error"
                    assert said == refusal, (name, path, str(answer)[:300])

        hostile, expected = cases(), answered()
        idle = memory(pid)
        refused()
        started, sizes = time.monotonic(), [memory(pid)]
        for _ in range(scaled(3, 3, long=8)):
            refused()
            sizes.append(memory(pid))
        assert answered() == expected
        count, peak = 3 * len(hostile) * len(sizes), memory(pid, "VmHWM")
        megabytes = ", ".join(str(size >> 20) for size in sizes)
        print(
            f"{count} requests, the last {time.monotonic() - started:.0f} s; MB: idle "
            f"{idle >> 20}, after each round {megabytes}, peak {peak >> 20}"
        )
        assert sizes[-1] - sizes[0] < GROWTH
        assert peak - idle < PEAK
