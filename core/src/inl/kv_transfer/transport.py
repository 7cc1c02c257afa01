"""Transports of plugins: they copy contents of blocks beside a link.

The link says what was copied and its checksum, so that a transport needs to be neither
in order nor right: what differs is computed again.
"""

from __future__ import annotations

import hmac
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from inl.errors import DeviceError, InlError, PluginError, ProtocolError
from inl.kv_transfer.checksums import checksum
from inl.kv_transfer.link import Kind, Message
from inl.protocol.wire_arrays import content_pieces, read_contents
from inl.spec.message import MAX_TRANSFER

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.kv_transfer.link import Link
    from inl.spec.cache_layout import BlockLayout, Parts

    Memory = NDArray[np.uint8]

ROOM_BYTES, HEAD_BYTES = 32 << 20, 64 << 10
"""Least memory of one ticket on each side, and that beside contents of blocks."""


class Transport(ABC):
    """Writes host memory of this process to that of another one. Thread-safe."""

    @abstractmethod
    def register(self, memory: Memory) -> bytes:
        """Prepare memory, uint8 [n], for writes from here and to here.

        It stays alive until :meth:`release`. Returns what another process needs to
        write to it. Raises OSError or :class:`~inl.errors.InlError`.
        """

    @abstractmethod
    def release(self, memory: Memory) -> None:
        """Forget registered memory, to which nothing is written afterwards."""

    @abstractmethod
    def write(self, memory: Memory, target: bytes, seconds: float) -> None:
        """Copy memory to the beginning of that of another process, and wait for it.

        memory: the beginning of registered memory. target: what :meth:`register`
        returned there. Raises OSError, TimeoutError after some seconds, or
        :class:`~inl.errors.InlError`.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free everything. Closing twice is allowed."""


def open_transport(name: str) -> Transport:
    """Return the transport that a plugin registers as ``name``.

    Raises :class:`~inl.errors.DeviceError` if it cannot be opened here.
    """
    from inl.plugin import registry
    from inl.plugin.contribution import describe

    try:
        origin, factory = registry().function("transport", name)
        transport = factory()
    except InlError as error:
        raise DeviceError(f"EngineConfig.kv_transport {name}: {error}") from error
    except Exception as error:
        raise DeviceError(
            f"EngineConfig.kv_transport {name}: cannot be opened: {describe(error)}"
        ) from error
    if not isinstance(transport, Transport):
        raise DeviceError(
            f"{origin}: transport {name}: found {type(transport).__name__}, accepted: "
            "an inl.kv_transfer.transport.Transport"
        )
    return transport


def room_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Return the memory of one ticket: a frame's contents of the largest cache group.

    Longer contents are sent over the link.
    """
    most = max((layout.block_bytes for layout in layouts), default=0)
    return max(MAX_TRANSFER * most + HEAD_BYTES, ROOM_BYTES)


class Room:
    """Registered memory of one ticket, ``size`` bytes.

    With one side's ``offer`` in its question, the other one's :meth:`send` writes there
    before each message, which :meth:`receive` reads and answers.
    """

    def __init__(self, name: str, transport: Transport, size: int) -> None:
        import numpy as np

        self.name, self._transport = name, transport
        self.memory: Memory = np.empty(size, np.uint8)
        self._read: Memory | None = None
        try:
            self._target = transport.register(self.memory)
        except Exception as error:
            raise _failed(name, error) from error

    @property
    def offer(self) -> dict[str, Any]:
        """What the other side needs to write here."""
        return {
            "name": self.name,
            "target": self._target.hex(),
            "bytes": len(self.memory),
        }

    def send(
        self, link: Link, offer: dict[str, Any], fields: dict[str, Any], parts: Parts
    ) -> None:
        """Send contents to the side of an offer, and wait until they are read.

        Raises OSError and :class:`~inl.errors.InlError`.
        """
        import numpy as np

        pieces = content_pieces(parts)
        size, at = sum(map(len, pieces)), 0
        if size > min(len(self.memory), offer["bytes"]):
            link.send(Kind.SPAN, fields, parts)
            return
        # Of the contents, not of their copy, which the transport may change.
        beside = {"beside": size, "checksum": checksum(pieces).hex()}
        for piece in pieces:
            self.memory[at : (at := at + len(piece))] = np.frombuffer(piece, np.uint8)
        memory = self.memory[:size]
        try:
            target = bytes.fromhex(offer["target"])
            self._transport.write(memory, target, link.seconds_left)
        except OSError:
            raise
        except Exception as error:
            raise _failed(self.name, error) from error
        link.send(Kind.SPAN, {**fields, **beside})
        answer = link.receive()
        if answer.kind is not Kind.READ:
            raise ProtocolError(f"ticket: found {answer.kind.name}, accepts READ")

    def receive(self, link: Link, message: Message) -> Message:
        """Return a message with its contents; raises as :meth:`send`.

        They are valid until the next one.
        """
        import numpy as np

        count = message.fields.get("beside")
        if message.kind is not Kind.SPAN or count is None:
            return message
        if type(count) is not int or not 0 < count <= len(self.memory):
            raise ProtocolError(f"contents: found {count!r:.40} bytes beside the link")
        # What is checked is a copy: a late write of an earlier ticket may come.
        if self._read is None:
            self._read = np.empty(len(self.memory), np.uint8)
        self._read[:count] = self.memory[:count]
        data = self._read[:count].data
        link.send(Kind.READ, {})  # the next contents come while these are checked
        said = str(message.fields.get("checksum")).encode()
        if not hmac.compare_digest(said, checksum([data]).hex().encode()):
            raise ProtocolError(
                f"contents by {self.name}: the checksum is wrong; computed here"
            )
        return message._replace(parts=read_contents(data))


class Rooms:
    """Memory of tickets, of which each has its own ``size`` bytes. Thread-safe.

    It is not freed with a ticket: the other side may still write there, such as after
    the ticket has expired. The checksum of the next contents then differs.
    """

    def __init__(self, name: str, size: int = ROOM_BYTES) -> None:
        self.name, self._size = name, size
        self._transport = open_transport(name)
        self._all: list[Room] = []
        self._free: list[Room] = []
        self._lock = threading.Lock()

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Yield memory of a ticket; raises :class:`~inl.errors.DeviceError`."""
        with self._lock:
            room = self._free.pop() if self._free else None
        if room is None:
            room = Room(self.name, self._transport, self._size)
            with self._lock:
                self._all.append(room)
        try:
            yield room
        finally:
            with self._lock:
                self._free.append(room)

    def close(self) -> None:
        """Close the transport. Closing twice is allowed."""
        with self._lock:
            rooms, self._all = self._all, []
        for room in rooms:
            self._transport.release(room.memory)
            _LEFT.append(room.memory)
            del _LEFT[:-MOST_LEFT]
        self._transport.close()


_LEFT: list[Memory] = []
"""Memory of closed engines, to which others may write for a while."""

MOST_LEFT = 64


def offered(fields: dict[str, Any], own: str | None) -> dict[str, Any] | None:
    """Return the offer of a question; ``None`` if contents go over the link.

    own: name of the transport here. Raises :class:`~inl.errors.PluginError` for
    another one.
    """
    offer = fields.get("transport")
    name = offer.get("name") if isinstance(offer, dict) else None
    if name != own:
        raise PluginError(
            f"transport: found {name!r:.40}, accepts {own!r}; set "
            "EngineConfig.kv_transport to the same name in both engines"
        )
    if not isinstance(offer, dict):
        return None
    if not isinstance(offer.get("target"), str) or type(offer.get("bytes")) is not int:
        raise PluginError(f"transport: found the offer {offer!r:.100}")
    return offer


def _failed(name: str, error: Exception) -> DeviceError:
    return DeviceError(f"transport {name}: {type(error).__name__}: {error}")
