"""The role of an engine beside others, and the store that it shares with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.kv_tiers.store import open_store
from inl.kv_transfer.link import MAC_BYTES
from inl.kv_transfer.spans import transfer_identity
from inl.kv_transfer.transport import Rooms, room_bytes
from inl.workers.settings import parse_address, read_secret

if TYPE_CHECKING:
    from inl.engine.block_access import BlockAccess
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.prefill_port import PrefillPort
    from inl.engine.remote_prefill import RemotePrefill
    from inl.engine.request_handle import RequestHandle
    from inl.engine.shared_blocks import SharedBlocks
    from inl.kv_tiers.record import Identity


class PrefillRole:
    """The connections that ``EngineConfig.role`` asks for, once they are started."""

    def __init__(self) -> None:
        self.port: PrefillPort | None = None
        self.remote: RemotePrefill | None = None
        self.store: SharedBlocks | None = None
        self._rooms: Rooms | None = None

    def start(
        self, engine: InferenceEngine, blocks: BlockAccess, identity: Identity | None
    ) -> None:
        """Listen for other engines, or find them, and open the store.

        Does nothing without ``kv_peer`` and ``kv_store``.

        identity: what contents of the engine's blocks depend on; ``None`` if they
        cannot be copied. Raises :class:`~inl.errors.RequestError` for an engine that
        shares no blocks, and :class:`~inl.errors.DeviceError` for an address that
        cannot be used.
        """
        config, scheduling = engine.config, engine.core.config
        if config.kv_store is not None:
            self._open_store(config.kv_store, engine, blocks, identity)
        if config.kv_peer is None:
            return
        shares = scheduling.prefix_cache and scheduling.use_kv_cache
        shares = blocks.carries_state or (shares and not scheduling.recurrent)
        if identity is None or not shares:
            raise RequestError(
                f"EngineConfig.role: found {config.role!r}, accepts both: the engine "
                "shares no blocks of prompts, or cannot copy them"
            )
        secret = read_secret(os.environ)
        if config.kv_transport is not None:
            size = room_bytes(identity.layouts)
            self._rooms = Rooms(config.kv_transport, size)
        if config.role == "prefill":
            from inl.engine.prefill_port import PrefillPort

            self.port = PrefillPort(
                engine, blocks, transfer_identity(identity), config.kv_peer, secret,
                rooms=self._rooms,
            )  # fmt: skip
            return
        from inl.engine.remote_prefill import RemotePrefill

        addresses = [each.strip() for each in config.kv_peer.split(",")]
        for address in addresses:
            parse_address(address, "EngineConfig.kv_peer")
        self.remote = RemotePrefill(
            blocks, identity, addresses, secret, most_bytes=config.host_bytes,
            rooms=self._rooms,
        )  # fmt: skip

    def _open_store(
        self,
        value: str,
        engine: InferenceEngine,
        blocks: BlockAccess,
        identity: Identity | None,
    ) -> None:
        if identity is None or engine.tiers is None:
            raise RequestError(
                f"EngineConfig.kv_store: found {value!r:.80}, accepts None: the engine "
                "shares no blocks of prompts, or cannot copy them"
            )
        from inl.engine.shared_blocks import SharedBlocks

        secret = read_secret(os.environ) or bytes(MAC_BYTES)
        size = engine.runner.limits.block_size
        self.store = SharedBlocks(
            blocks, identity, open_store(value), engine.tiers.costs, secret, size
        )

    def reset(self) -> None:
        """Make what the store has invalid, if there is one."""
        if self.store is not None:
            self.store.reset()

    def fetch(self, handles: Sequence[RequestHandle]) -> None:
        """Wait for blocks of prompts to be queued that others have or compute."""
        if self.store is not None:
            self.store.fetch_all(handles)
        if self.remote is not None:
            self.remote.fetch_all(handles)

    def fetch_then(
        self, handles: Sequence[RequestHandle], then: Callable[[], None]
    ) -> None:
        """Call ``then`` once such blocks have arrived, without waiting for them."""
        if self.remote is not None:
            then = partial(self.remote.fetch_then, handles, then)
        if self.store is None:
            then()
        else:
            self.store.fetch_then(handles, then)

    def close(self) -> None:
        """Close all connections. Closing twice is allowed."""
        for each in (self.port, self.remote, self.store):
            if each is not None:
                each.close()
        if self._rooms is not None:
            self._rooms.close()
