"""Writes of host memory by NIXL, over what UCX finds: RDMA, shared memory or TCP.

An agent of NIXL owns the connections of this process. What :meth:`register` returns has
the agent's metadata, with which another process connects, and the memory's address.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from inl.errors import DeviceError
from inl.kv_transfer.transport import Transport

if TYPE_CHECKING:
    from inl.kv_transfer.transport import Memory

TARGET = struct.Struct("<QQ")
"""Address and size of memory, before the metadata of its agent."""
KIND = "DRAM"
PAUSE_SECONDS = 50e-6
"""Between two questions whether a write is done."""


class NixlTransport(Transport):
    """One agent. Raises :class:`~inl.errors.DeviceError` if it cannot be made."""

    def __init__(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise DeviceError(f"NIXL cannot be imported: {error}") from error
        # A name is one of all processes that connect.
        name = f"inl-{secrets.token_hex(8)}"
        self._agent: Any = nixl_agent(name, nixl_agent_config())
        self._lock = threading.Lock()
        """Held in calls of the agent, none of which waits for another process."""
        self._registered: dict[int, Any] = {}

    def register(self, memory: Memory) -> bytes:
        address = memory.ctypes.data
        with self._lock:
            descriptors = self._agent.register_memory(
                [(address, memory.nbytes, 0, "")], KIND
            )
            self._registered[address] = descriptors
            metadata: bytes = self._agent.get_partial_agent_metadata(
                descriptors, inc_conn_info=True
            )
        return TARGET.pack(address, memory.nbytes) + metadata

    def release(self, memory: Memory) -> None:
        with self._lock:
            descriptors = self._registered.pop(memory.ctypes.data, None)
            if descriptors is not None:
                self._agent.deregister_memory(descriptors)

    def write(self, memory: Memory, target: bytes, seconds: float) -> None:
        end = time.monotonic() + seconds
        address, size = TARGET.unpack_from(target)
        if memory.nbytes > size:
            raise DeviceError(f"nixl: found {memory.nbytes} bytes, accepts {size}")
        handle = self._begin(memory, address, target[TARGET.size :])
        try:
            while (state := self._state(handle)) != "DONE":
                if state == "ERR":
                    raise ConnectionResetError("nixl: the write has failed")
                if time.monotonic() > end:
                    raise TimeoutError("nixl: the write has taken too long")
                time.sleep(PAUSE_SECONDS)
        finally:
            with self._lock:
                self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        with self._lock:
            for descriptors in self._registered.values():
                self._agent.deregister_memory(descriptors)
            self._registered.clear()
            # Its threads must end before the process does.
            self._agent = None

    def _begin(self, memory: Memory, address: int, metadata: bytes) -> Any:
        agent, size = self._agent, memory.nbytes
        with self._lock:
            name = agent.add_remote_agent(metadata)
            own = agent.get_xfer_descs([(memory.ctypes.data, size, 0)], KIND)
            other = agent.get_xfer_descs([(address, size, 0)], KIND)
            handle = agent.initialize_xfer("WRITE", own, other, name)
            agent.transfer(handle)
        return handle

    def _state(self, handle: Any) -> str:
        with self._lock:
            state: str = self._agent.check_xfer_state(handle)
        return state
