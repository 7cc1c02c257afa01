"""Blocks that engines share in a store: read before a request is queued, written after.

Whatever does not arrive in time, or is not what it has to be, is computed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from inl.errors import InlError
from inl.kv_tiers.record import BadRecord, decoded, encoded, head
from inl.spec.cache_layout import BLOCKS, divided
from inl.spec.message import MAX_TRANSFER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inl.engine.block_access import BlockAccess
    from inl.engine.request_handle import RequestHandle
    from inl.kv_tiers.record import Identity
    from inl.kv_tiers.store import Store
    from inl.kv_tiers.tiers import Costs
    from inl.kv_transfer.spans import TokenSpan
    from inl.spec.cache_layout import Parts

log = logging.getLogger("inl")

SECONDS = 5.0
"""Longest wait for one answer of the store."""
AWAY_SECONDS = 5.0
"""Time for which a store that did not answer is not asked."""
LEAST_TOKENS = 64
"""Tokens that are lacking from which on the store is asked."""
THREADS, CALLS = 16, 8
"""Requests that read at a time, and calls of the store."""
MOST_WAITING = 256
"""Requests whose blocks wait to be written; those of earlier ones are not."""
MOST_NAMES = 1 << 18
"""Names of records that are known to be stored."""
SPANS = 4
"""Spans of 16 blocks that are read from the device at a time."""
POLL_SECONDS = 0.05
"""Between looks at requests whose blocks are written when they have finished."""

T = TypeVar("T")


class Away(Exception):
    """The store does not answer; ``kind`` is what that is counted as."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class SharedBlocks:
    """Reads and writes blocks of one engine in a store. Thread-safe.

    blocks: of an engine with tiers, whose memory receives contents. costs: of these
    tiers. secret: that the engines know, by which records are signed.
    """

    def __init__(
        self, blocks: BlockAccess, identity: Identity, store: Store, costs: Costs,
        secret: bytes, block_size: int,
    ) -> None:  # fmt: skip
        self._blocks, self._identity, self._store = blocks, identity, store
        self._costs, self._secret, self._block_size = costs, secret, block_size
        self.counts: Counter[str] = Counter()
        """Blocks that were "read" and "written", and for which there was no room,
        "full"; records that were "damaged", "foreign" or "stale"; calls that "failed"
        or "expired"; requests whose blocks were not written in time, "dropped"."""
        digest = sha256(repr((identity.model, identity.dtype)).encode()).hexdigest()
        self._prefix = f"inl.{digest[:32]}"
        self._known: OrderedDict[str, None] = OrderedDict()
        self._away_until = 0.0
        self._needs_reset = False
        self._lock = threading.Lock()
        self._has_handles = threading.Condition(self._lock)
        self._handles: deque[RequestHandle] = deque()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="inl-store")
        self._calls = ThreadPoolExecutor(CALLS, thread_name_prefix="inl-store-call")
        self._closed = False
        self._writer = threading.Thread(target=self._write_finished, daemon=True)
        self._writer.start()

    def fetch_all(self, handles: Sequence[RequestHandle]) -> None:
        """Wait for the blocks of several prompts."""
        with suppress(RuntimeError):  # the threads have ended: it was closed
            list(self._threads.map(self.fetch, handles))

    def fetch_then(
        self, handles: Sequence[RequestHandle], then: Callable[[], None]
    ) -> None:
        """As :meth:`fetch_all`, without waiting; calls ``then`` on a thread."""

        def run() -> None:
            try:
                for handle in handles:
                    self.fetch(handle)
            finally:
                then()

        try:
            self._threads.submit(run)
        except RuntimeError:
            then()

    def fetch(self, handle: RequestHandle) -> None:
        """Read the blocks of a prompt that the engine lacks. Raises nothing."""
        request = handle.request
        if self._closed or request.embeddings is not None or request.pooled:
            return
        if len(request.tokens) >= self._block_size:
            with self._has_handles:
                self._handles.append(handle)
                if len(self._handles) > MOST_WAITING:
                    self._handles.popleft()
                    self.counts["dropped"] += 1
                self._has_handles.notify()
        if handle.completed or request.prompt_logprobs is not None:
            return
        try:
            self._fetch(handle)
        except Away as away:
            self._leave(away)
        except Exception:
            log.exception("shared store: a prompt is computed here")
            self._count("failed")

    def reset(self) -> None:
        """Make all records of this model invalid, those of other engines too."""
        self._needs_reset = True
        with suppress(Away):
            self._generation()

    def close(self) -> None:
        """Write no more and leave the store; closing twice is allowed."""
        with self._has_handles:
            was_closed, self._closed = self._closed, True
            self._has_handles.notify()
        if was_closed:
            return
        self._writer.join(2 * SECONDS)
        for each in (self._threads, self._calls):
            each.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _fetch(self, handle: RequestHandle) -> None:
        request, size = handle.request, self._block_size
        lacking = self._blocks.lacking_tokens(request)
        if lacking < LEAST_TOKENS or time.monotonic() < self._away_until:
            return
        keys, generation = self._blocks.keys(request), self._blocks.generation
        start, groups = len(keys) - lacking // size, range(len(self._identity.layouts))
        if not self._costs.pays({"store": lacking // size}, lacking):
            return
        epoch = self._generation()
        for at in range(start, len(keys), MAX_TRANSFER):
            began, several = time.perf_counter(), keys[at : at + MAX_TRANSFER]
            names = [self._name(group, key) for key in several for group in groups]
            values = iter(self._call(partial(self._store.get, names)))
            found: list[list[Parts]] = []
            for key in several:
                each = [self._read(group, key, epoch, next(values)) for group in groups]
                whole = [parts for parts in each if parts is not None]
                if len(whole) < len(each):
                    break
                found.append(whole)
            for group in groups:
                contents = [(at + n, parts[group]) for n, parts in enumerate(found)]
                stored = self._blocks.store(request, group, contents, generation)
                if stored is None:  # the prefix cache was reset
                    return
            self._count("read", len(found) * len(groups))
            if found:
                seconds = time.perf_counter() - began
                self._costs.loaded("store", len(found), seconds)
            if len(found) < len(several) or handle.completed or self._closed:
                return

    def _read(self, group: int, key: bytes, epoch: int, value: object) -> Parts | None:
        if value is None:
            return None
        own = head(self._identity, group, key, epoch)
        try:
            parts = decoded(self._secret, own, bytes(value))  # type: ignore[call-overload]
        except BadRecord as error:
            self._count(error.kind)
            return None
        self._know(self._name(group, key))
        return parts

    def _generation(self) -> int:
        """Return the number that valid records have, the same for all engines."""
        name = f"{self._prefix}.generation"
        if not self._needs_reset:
            (value,) = self._call(lambda: self._store.get([name]))
            if value is not None:
                return int.from_bytes(bytes(value)[:8], "little")
        replaces, number = self._needs_reset, secrets.token_bytes(8)
        put = partial(self._store.put, name, [number], is_pinned=True)
        self._call(partial(put, replaces=replaces))
        self._needs_reset = False
        with self._lock:
            self._known.clear()
        (value,) = self._call(lambda: self._store.get([name]))
        if value is None:
            raise Away("failed", "the store keeps nothing")
        return int.from_bytes(bytes(value)[:8], "little")

    def _call(self, ask: Callable[[], T]) -> T:
        """Return an answer of the store; raises :class:`Away`."""
        if time.monotonic() < self._away_until or self._closed:
            raise Away("", "")
        try:
            return self._calls.submit(ask).result(SECONDS)
        except TimeoutError:
            raise Away("expired", f"no answer within {SECONDS:g} s") from None
        except (OSError, InlError, RuntimeError) as error:
            raise Away("failed", f"{type(error).__name__}: {error}") from error

    def _leave(self, away: Away) -> None:
        if not away.kind:
            return
        self._away_until = time.monotonic() + AWAY_SECONDS
        with self._lock:
            self._known.clear()  # it may come back empty
        self._count(away.kind)
        if self.counts[away.kind] == 1:
            log.warning(
                "shared store: %s; blocks are computed here. Further ones are only "
                "counted", away,
            )  # fmt: skip

    def _write_finished(self) -> None:
        """Write the blocks of each request that has finished."""
        while True:
            with self._has_handles:
                while not self._handles and not self._closed:
                    self._has_handles.wait()
                finished = [each for each in self._handles if each.completed]
                self._handles = deque(x for x in self._handles if not x.completed)
                if self._closed:
                    return
                if not finished:
                    self._has_handles.wait(POLL_SECONDS)
            for handle in finished:
                try:
                    self._write(handle)
                except Away as away:
                    self._leave(away)
                except Exception:
                    log.exception("shared store: blocks are not stored")
                    self._count("failed")

    def _write(self, handle: RequestHandle) -> None:
        request = handle.request
        if handle.error is not None or time.monotonic() < self._away_until:
            return
        keys = self._blocks.keys(request)
        groups = range(len(self._identity.layouts))
        names = [[self._name(group, key) for key in keys] for group in groups]
        sent = [self._first(each) for each in names]
        if all(first == len(keys) for first in sent):
            return
        epoch = self._generation()
        while spans := self._blocks.read(request, sent, SPANS):
            for span in spans:
                sent[span.group] = span.stop // self._block_size
                if not self._put(span, keys, names[span.group], epoch):
                    return

    def _put(
        self, span: TokenSpan, keys: Sequence[bytes], names: Sequence[str], epoch: int
    ) -> bool:
        """Write the blocks of a span; returns whether there was room."""
        first = span.start // self._block_size
        for number, parts in enumerate(divided(span.parts, span.blocks, BLOCKS)):
            name, key = names[first + number], keys[first + number]
            if self._is_known(name):
                continue
            own = head(self._identity, span.group, key, epoch)
            pieces = encoded(self._secret, own, parts)
            put = partial(self._store.put, name, pieces)
            if not self._call(put):
                self._count("full")
                return False
            self._know(name)
            self._count("written")
        return True

    def _first(self, names: Sequence[str]) -> int:
        """Return the index of the first record that is not known to be stored."""
        unknown = (n for n, name in enumerate(names) if not self._is_known(name))
        return next(unknown, len(names))

    def _is_known(self, name: str) -> bool:
        with self._lock:
            return name in self._known

    def _know(self, name: str) -> None:
        with self._lock:
            self._known[name] = None
            while len(self._known) > MOST_NAMES:
                self._known.popitem(last=False)

    def _name(self, group: int, key: bytes) -> str:
        return f"{self._prefix}.{group}.{key.hex()}"

    def _count(self, name: str, value: int = 1) -> None:
        with self._lock:
            self.counts[name] += value
