"""Time of a step's frame and reply between two processes: a pipe against TCP with TLS.

    python bench/frame_cost.py --step-ms 5.2

For decoding steps of some rows, the messages of the wire protocol (frame, request of
the reply, reply) go to another process and back, in turns over a pair of sockets, as a
worker of this host has, and over loopback TCP inside TLS 1.3, as one of another host
has. The difference is the cost of TCP and TLS; while steps are in flight, most of it is
hidden behind the device. ``--step-ms`` is the time of a step that it is a share of.
Exits with 1 above 2 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from typing import Any

import numpy as np

from inl.protocol import wire_arrays
from inl.protocol.runner import Reply
from inl.protocol.wire import Channel, Kind
from inl.spec.message import Row, step_frame
from inl.spec.step import Bucket
from inl.workers.encryption import encrypt, new_certificate, shake_hands

SECONDS = 30.0


def serve(ours: Any, rows: int, address: tuple[str, int] | None) -> None:
    """Answer every request with the reply of a step, as a worker does."""
    if address is not None:
        sock = socket.create_connection(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours, _ = encrypt(sock, time.monotonic() + SECONDS)
    channel = Channel(ours)
    tokens = np.zeros((rows, 1), np.int32)
    while True:
        try:
            frame = channel.receive()
        except EOFError:
            return
        if frame is not None and frame.kind is Kind.COLLECT:
            channel.send(Kind.REPLY, wire_arrays.reply(Reply(1, tokens)))


def connected(rows: int, *, tls: bool) -> tuple[Channel, Any]:
    """Return a channel to another process, and that process."""
    context = multiprocessing.get_context("spawn")
    if not tls:
        ours, theirs = socket.socketpair()
        child = context.Process(target=serve, args=(theirs, rows, None), daemon=True)
        child.start()
        theirs.close()
        return Channel(ours), child
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        child = context.Process(target=serve, args=(None, rows, address), daemon=True)
        child.start()
        accepted, _ = listening.accept()
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    encrypted = new_certificate().context.wrap_socket(
        accepted, server_side=True, do_handshake_on_connect=False
    )
    shake_hands(encrypted, time.monotonic() + SECONDS)
    return Channel(encrypted), child


def microseconds(channel: Channel, frame: memoryview, count: int) -> float:
    """Median time from a frame to its reply."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        channel.send(Kind.MESSAGE, frame)
        channel.send(Kind.COLLECT)
        reply = channel.receive(SECONDS)
        assert reply is not None, "the other process answers"
        wire_arrays.read_reply(reply.payload)
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    most = 0.0
    for rows in given.rows:
        frame = step_frame(
            Bucket(rows, rows), [Row(row + 1, [-1]) for row in range(rows)],
            step=0, groups=1, block_size=16, decode_rows=rows,
        )  # fmt: skip
        data = wire_arrays.words(frame)
        found: dict[bool, list[float]] = {False: [], True: []}
        pairs = {tls: connected(rows, tls=tls) for tls in found}
        for _ in range(given.turns):
            for tls, (channel, _) in pairs.items():
                found[tls].append(microseconds(channel, data, given.count))
        pipe, tls = (statistics.median(found[each]) for each in (False, True))
        share = (tls - pipe) / (1e3 * given.step_ms)
        most = max(most, share)
        print(
            f"{rows} rows, frame of {len(data):,} bytes: pipe {pipe:.0f} us, TCP with "
            f"TLS {tls:.0f} us: {tls - pipe:+.0f} us, {share:.2%} of {given.step_ms:g} "
            "ms",
            flush=True,
        )
        for channel, child in pairs.values():
            channel.shutdown()
            child.join(SECONDS)
            channel.close()
    assert threading.active_count() == 1, "nothing is left running"
    return 0 if most <= 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
