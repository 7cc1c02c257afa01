"""A client of Mooncake Store, which lends memory of this process to the store.

Its library links CUDA's runtime even where it uses none; that of the package
nvidia-cuda-runtime-cu12 is loaded first.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from inl.config import size_of
from inl.errors import DeviceError
from inl.kv_tiers.store import Store

OPTIONS = {"segment": "1GiB", "buffer": "256MiB", "protocol": "tcp", "device": "",
           "host": ""}  # fmt: skip
"""Options behind the address, and their defaults."""
KEEPS, FULL = 0, (-200,)
"""Results of a call that has stored a value, and for want of room."""


class MooncakeStore(Store):
    """Values in the store of a master at ``HOST:PORT?option=value&...``.

    Options: "segment", memory that this process lends to the store; "buffer", memory of
    contents on their way; "protocol", "tcp" or "rdma"; "device" of RDMA; "host", the
    address of this host for others, by default the one that reaches the master. Raises
    :class:`~inl.errors.DeviceError`.
    """

    def __init__(self, address: str) -> None:
        master, _, query = address.partition("?")
        found = dict(parse_qsl(query))
        if not found.keys() <= OPTIONS.keys():
            raise DeviceError(
                f"mooncake: found options {', '.join(found)}, accepts "
                f"{', '.join(OPTIONS)}"
            )
        options = OPTIONS | found
        segment, buffer = (_size(options, name) for name in ("segment", "buffer"))
        store, self._config = _library()
        self._store: Any = store()
        self._lock = threading.Lock()
        self._is_closed = False
        result = self._store.setup(
            options["host"] or _own_address(master), "P2PHANDSHAKE", segment, buffer,
            options["protocol"], options["device"], master,
        )  # fmt: skip
        if result:
            raise DeviceError(
                f"mooncake: the master at {master} cannot be used (error {result}); "
                "start mooncake_master there"
            )

    def get(self, names: Sequence[str]) -> Sequence[bytes | None]:
        exist = self._store.batch_is_exist(list(names))
        if any(each < 0 for each in exist):
            raise ConnectionError(f"mooncake: error {min(exist)}")
        there = [name for name, is_there in zip(names, exist, strict=True) if is_there]
        # An empty value is one that has disappeared meanwhile.
        values = dict(
            zip(there, self._store.get_batch(there) if there else (), strict=True)
        )
        return [values.get(name) or None for name in names]

    def put(
        self,
        name: str,
        pieces: Sequence[bytes | bytearray | memoryview],
        *,
        replaces: bool = False,
        is_pinned: bool = False,
    ) -> bool:
        if replaces:
            self._store.remove(name, True)
        config = self._config()
        config.with_hard_pin = is_pinned
        result = self._store.put_parts(name, *pieces, config=config)
        if result in FULL:
            return False
        if result != KEEPS:
            raise ConnectionError(f"mooncake: error {result}")
        return True

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._store.close()


def _size(options: dict[str, str], name: str) -> int:
    size = size_of(options[name])
    if size is None:
        raise DeviceError(
            f"mooncake: {name}: found {options[name]!r:.40}, accepts a size such as "
            "4GiB"
        )
    return size


def _own_address(master: str) -> str:
    """Return the address of this host from which a master is reached."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 5.0) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError, OverflowError) as error:
        raise DeviceError(
            f"mooncake: found no master at {master!r:.80} ({error}); accepts HOST:PORT "
            "of mooncake_master"
        ) from error


def _library() -> tuple[Any, Any]:
    try:
        import nvidia.cuda_runtime

        folder = Path(next(iter(nvidia.cuda_runtime.__path__)))
        ctypes.CDLL(str(folder / "lib" / "libcudart.so.12"), os.RTLD_GLOBAL)
        from mooncake import store
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"Mooncake cannot be imported: {error}; it needs Debian's package "
            "libibverbs1"
        ) from error
    return store.MooncakeDistributedStore, store.ReplicateConfig
