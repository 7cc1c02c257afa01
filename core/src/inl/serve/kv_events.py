"""Publishes what happens to shared KV cache blocks, as vLLM does, over ZeroMQ.

Routers that know vLLM subscribe to it. Each message has three frames: a topic, a
sequence number of eight bytes, and a batch in MessagePack: an array of a time, events
and a rank. Events are maps with a ``type``, as vllm-router 0.1.17 wants them; versions
of vLLM differ in what is a map and what an array. A second socket sends batches again,
from a number on; with the topic before them if there is one, as llm-d wants, and newer
versions of vLLM do.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from inl.engine.records import BlocksRemoved, BlocksStored, KVEvent
from inl.errors import MissingPackage, RequestError
from inl.install_command import install_command

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("inl.serve")

MEDIUM = "GPU"
"""Name of the memory of any device in this format."""

KEPT_BATCHES = 10_000
"""Batches that can be sent again."""

MOST_EVENTS = 1_000
"""Events of a batch."""

MOST_BYTES = 1 << 10
"""Bytes of a request for batches, which needs 8."""

WAIT_SECONDS = 0.1
"""Time between two looks for subscribers that ask for batches again."""

RANK = "{rank}"
"""What the number of an engine replaces in a topic."""

END = (-1).to_bytes(8, "big", signed=True)
"""Number of the message behind the last one that is sent again."""


class BlockStored(msgspec.Struct, tag=True):
    """Consecutive blocks can be shared. Their hashes are the first 64 bits of keys."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be shared any more."""


class Batch(msgspec.Struct, array_like=True):
    """Events of a sequence number. ts: time, in seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def encoded_event(
    event: KVEvent, adapters: Mapping[str, str]
) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """Return an event in vLLM's form.

    adapters: names by digest; an adapter without a name has its digest.
    """
    if isinstance(event, BlocksStored):
        digest = event.adapter_digest
        return BlockStored(
            [_hash(key) for key in event.keys],
            None if event.parent is None else _hash(event.parent),
            list(event.tokens),
            event.block_size,
            None,
            MEDIUM,
            adapters.get(digest, digest) or None,
        )
    if isinstance(event, BlocksRemoved):
        return BlockRemoved([_hash(key) for key in event.keys], MEDIUM)
    return AllBlocksCleared()


class KVEventPublisher:
    """Publishes events on a thread of its own.

    endpoint: address of ZeroMQ; it is bound if it has a ``*``, and connected to
    otherwise. replay: address at which batches can be asked for again. topic: first
    frame of each message, in which ``{rank}`` is replaced. rank: of each batch, by
    which subscribers tell several engines of one server apart. Raises
    :class:`~inl.errors.RequestError` for an address of no use, and
    :class:`~inl.errors.MissingPackage`.
    """

    def __init__(
        self, endpoint: str, replay: str | None = None, topic: str = "", rank: int = 0
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise MissingPackage(
                "zmq, which --kv-events needs, is not installed. "
                f"Try: {install_command('inl-core[kv-events]')}"
            ) from error
        self.adapters: dict[str, str] = {}
        """Names of adapters by digest."""
        self.missed = 0
        """Batches that were asked for again and are no longer kept."""
        self._topic, self._rank = topic.replace(RANK, str(rank)).encode(), rank
        self._events: queue.SimpleQueue[KVEvent | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._numbers = count()
        self._context = zmq.Context()
        self._socket = self._open(zmq.PUB, endpoint)
        self._replay: Any = None
        if replay is not None:
            self._replay = self._open(zmq.ROUTER, replay)
        self._thread = threading.Thread(target=self._run, name="inl-kv-events")
        self._thread.start()

    def _open(self, kind: int, endpoint: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MOST_BYTES  # of what anyone who can connect may send
        try:
            if "*" in endpoint or kind == zmq.ROUTER:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise RequestError(
                f"--kv-events {endpoint}: {error.strerror.lower()}; accepts an address "
                "of ZeroMQ, such as tcp://*:5557"
            ) from error
        return socket

    @property
    def endpoint(self) -> str:
        """The address that subscribers of this host use."""
        return _local(self._socket.last_endpoint)

    @property
    def replay_endpoint(self) -> str:
        """The address at which they ask for batches again."""
        return _local(self._replay.last_endpoint)

    def put(self, event: KVEvent) -> None:
        """Publish an event. Returns at once; thread-safe."""
        self._events.put(event)

    def close(self) -> None:
        """Publish what was put, and end. Closing twice is allowed."""
        if self._thread.is_alive():
            self._events.put(None)
            self._thread.join()
            self._context.destroy(0)

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        is_open = True
        while is_open:
            if self._replay is not None and self._replay.poll(0):
                self._send_again()
            events: list[KVEvent | None] = []
            with suppress(queue.Empty):
                events.append(self._events.get(timeout=WAIT_SECONDS))
                while len(events) < MOST_EVENTS and events[-1] is not None:
                    events.append(self._events.get_nowait())
            found = [each for each in events if each is not None]
            is_open = len(found) == len(events)
            if found:
                named = [encoded_event(each, self.adapters) for each in found]
                data = encode(Batch(time.time(), named, self._rank))
                number = next(self._numbers)
                self._kept.append((number, data))
                self._socket.send_multipart([self._topic, _number(number), data])

    def _send_again(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("KV events: found a request of %d frames", len(frames))
            return
        head, first = frames[:2], int.from_bytes(frames[2], "big")
        missed = self._kept[0][0] - first if self._kept else 0
        if missed > 0:
            self.missed += missed
            log.warning(
                "KV events: a subscriber asked for batches from %d on; the oldest kept "
                "is %d, so it knows nothing of %d", first, self._kept[0][0], missed,
            )  # fmt: skip
        named = [*head, self._topic] if self._topic else head
        for number, data in self._kept:
            if number >= first:
                self._replay.send_multipart([*named, _number(number), data])
        end = [*head, b""] if self._topic else head
        self._replay.send_multipart([*end, END, b""])


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _local(endpoint: bytes) -> str:
    return endpoint.rstrip(b"\0").decode().replace("0.0.0.0", "127.0.0.1")


def next_endpoint(endpoint: str | None, index: int) -> str | None:
    """Return the endpoint of another engine of this host, on a port of its own."""
    if endpoint is None or not index:
        return endpoint
    head, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise RequestError(
            f"--kv-events {endpoint}: found no port, from which each of several "
            "engines would take the next one; accepts one such as tcp://*:5557"
        )
    return f"{head}:{int(port) + index if int(port) else 0}"
