"""Answers the requests of batches: one batch of each key at a time, keys in turns."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
from inl.serve.api_error import ApiError, as_api_error
from inl.serve.batch_calls import answer_of, at_once, end_tasks
from inl.serve.batches.batch import Batch
from inl.serve.batches.batch_lines import (
    append,
    batch_error,
    plan,
    request_at,
    write_results,
)
from inl.serve.batches.places import Places
from inl.serve.request_log import Record
from inl.serve.threads import run_to_end

if TYPE_CHECKING:
    from inl.serve.batch_calls import App
    from inl.serve.batches.file_store import FileStore, StoredFile

log = logging.getLogger("inl.serve")

MAX_BATCHES = 1000
"""Batches that are remembered; the oldest that have ended are forgotten."""

RESULT_FILES = 2
"""Files that a batch ends with, at most."""

THREADS = 2
"""Threads that read and write the lines of batches."""

WINDOW_SECONDS = 24 * 3600
"""The completion window, after which what is not answered expires."""

EXPIRED = {"code": "batch_expired",
           "message": "the request was not answered within the window"}  # fmt: skip
CANCELLED = {"code": "batch_cancelled", "message": "the batch was cancelled"}


class BatchQueue:
    """All batches of a folder. Used by the event loop only.

    concurrency: requests that run at the same time.
    """

    def __init__(self, files: FileStore, *, concurrency: int) -> None:
        self.files = files
        self._concurrency = concurrency
        self._batches = {each.id: each for each in files.records("batch", Batch)}
        self._most = max(MAX_BATCHES // files.keys, 1)
        self._changed = asyncio.Event()
        self._places = Places(concurrency)
        self._threads = ThreadPoolExecutor(THREADS, "inl-batches")
        self._owners: dict[str, asyncio.Task[None]] = {}
        """Answers the batches of a key."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """Answers a batch, by its id."""
        self._kept: dict[str, int] = {}
        """Bytes of the answers of a batch that are no file yet."""
        self._numbers = itertools.count()
        files.is_used = self.uses
        for batch in self._batches.values():
            part = self._part(batch)
            if batch.has_ended:
                part.unlink(missing_ok=True)
            else:
                self._keep(batch)
                self._count_part(batch)

    def _keep(self, batch: Batch) -> None:
        """Keep places for the files of a batch that has not ended."""
        self.files.take(batch.owner, 0, RESULT_FILES)
        self._kept[batch.id] = 0

    def _keep_no_more(self, batch: Batch) -> None:
        if batch.id in self._kept:
            size = self._kept.pop(batch.id)
            self.files.take(batch.owner, -size, -RESULT_FILES)

    def _count(self, batch: Batch, size: int) -> None:
        """Count bytes of the answers of a batch."""
        self._kept[batch.id] += size
        self.files.take(batch.owner, size)

    def _count_part(self, batch: Batch) -> None:
        """Count the answers that a batch has."""
        part = self._part(batch)
        size = part.stat().st_size if part.exists() else 0
        self._count(batch, size - self._kept[batch.id])

    def _part(self, batch: Batch) -> Path:
        """Return the file of a batch's answers, as they arrive."""
        return self.files.folder / f"{batch.id}.part"

    def add(
        self, file: StoredFile, endpoint: str, metadata: dict[str, Any] | None
    ) -> Batch:
        """Queue a batch; raises :class:`ApiError` 400 if there are too many."""
        self._forget(file.owner)
        self.files.check_room(file.owner, 0, RESULT_FILES)
        now = int(time.time())
        batch = Batch(
            f"batch_{now:012x}{secrets.token_hex(6)}",
            file.owner,
            endpoint,
            file.id,
            now,
            now + WINDOW_SECONDS,
            metadata=metadata,
        )
        self._batches[batch.id] = batch
        self._keep(batch)
        self._save(batch)
        self._changed.set()
        return batch

    def _forget(self, owner: str) -> None:
        """Make room for a batch of a key, which takes it from no other one's."""
        mine = [each for each in self._batches.values() if each.owner == owner]
        if len(mine) < self._most:
            return
        oldest = next((each for each in mine if each.has_ended), None)
        if oldest is None:
            raise ApiError(
                400,
                f"batch: found {len(mine)} of this key that have not ended, accepts "
                f"{self._most}; cancel one, or wait",
                code="storage_full",
            )
        del self._batches[oldest.id]
        (self.files.folder / f"{oldest.id}.json").unlink(missing_ok=True)

    def find(self, owner: str, name: str) -> Batch:
        """Return a batch of an owner; raises :class:`ApiError` 404."""
        batch = self._batches.get(name)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"batch: found no batch {name!r:.60}", param="batch_id")
        return batch

    def of(self, owner: str) -> Sequence[Batch]:
        """Return the batches of an owner, the newest first."""
        batches = reversed(self._batches.values())
        return [each for each in batches if each.owner == owner]

    def uses(self, file: StoredFile) -> bool:
        """Whether a batch that has not ended needs a file."""
        return any(
            each.input_file_id == file.id and not each.has_ended
            for each in self._batches.values()
        )

    def cancel(self, batch: Batch) -> None:
        """Answer no more requests of a batch; raises :class:`ApiError` 409."""
        if batch.status not in ("validating", "in_progress"):
            raise ApiError(
                409, f"batch: found status {batch.status}; accepts one that runs",
                param="batch_id", code="invalid_status",
            )  # fmt: skip
        batch.after = "cancelled"
        self._enter(batch, "cancelling")
        if (work := self._running.get(batch.id)) is not None:
            work.cancel()
        self._changed.set()

    async def run(self, endpoints: App) -> None:
        """Answer all batches, until it is cancelled; they go on after a restart.

        endpoints: application without access control.
        """
        try:
            while True:
                self._changed.clear()
                for batch in self._batches.values():
                    if not batch.has_ended and batch.owner not in self._owners:
                        work = self._run_all(batch.owner, endpoints)
                        self._owners[batch.owner] = asyncio.create_task(work)
                await self._changed.wait()
        finally:  # the server stops
            await end_tasks(self._owners.values())

    async def _run_all(self, owner: str, endpoints: App) -> None:
        """Answer the batches of a key, one after the other, until all have ended."""
        while (batch := self._next(owner)) is not None:
            work = asyncio.create_task(self._run(batch, endpoints))
            self._running[batch.id] = work
            try:
                await asyncio.wait([work])
            finally:
                await end_tasks([work])
                del self._running[batch.id]
            if not work.cancelled() and (error := work.exception()):
                log.error("%s failed", batch.id, exc_info=error)
                text = as_api_error(error).message
                with suppress(OSError):  # the disk may take no record either
                    self._fail(batch, [batch_error("server_error", text)])
        del self._owners[owner]

    def _next(self, owner: str) -> Batch | None:
        """Return the oldest open batch of a key."""
        mine = (each for each in self._batches.values() if each.owner == owner)
        return next((each for each in mine if not each.has_ended), None)

    async def _run(self, batch: Batch, endpoints: App) -> None:
        """Bring a batch to its end, from whatever status it has."""
        try:
            if batch.status in ("validating", "in_progress"):
                await self._answer(batch, endpoints)
            if not batch.has_ended:
                self._enter(batch, "finalizing")
                await self._finalize(batch)
                self._enter(batch, batch.after)
                self._part(batch).unlink(missing_ok=True)
        except (FileNotFoundError, RequestError) as error:
            path = str(self.files.path(batch.input_file_id))
            text = str(error).replace(path, batch.input_file_id)
            self._fail(batch, [batch_error("invalid_file", text)])

    async def _answer(self, batch: Batch, endpoints: App) -> None:
        """Answer what has no answer yet; a batch that is refused fails."""
        path = self.files.path(batch.input_file_id)
        reading = partial(plan, path, self._part(batch), batch.endpoint)
        found = await run_to_end(self._threads, reading)
        if found.errors:
            self._fail(batch, found.errors)
            return
        self._count_part(batch)
        batch.total, batch.completed, batch.failed = found.total, found.finished, 0
        self._enter(batch, "in_progress")
        app, waiting = self._app(endpoints, batch.owner), iter(found.starts)
        writing = asyncio.Lock()

        async def work() -> None:
            for start in waiting:
                # Until it is written, so that few answers are in memory.
                async with self._places.place(batch.owner):
                    reading = partial(request_at, path, start)
                    request = await run_to_end(self._threads, reading)
                    answer = await answer_of(app, request.url, request.body)
                    encoding = partial(answer.line, request.custom_id)
                    line = await run_to_end(self._threads, encoding)
                    async with writing:
                        await self._write(batch, line)
                if answer.status == 200:
                    batch.completed += 1
                else:
                    batch.failed += 1

        try:
            async with asyncio.timeout(max(batch.expires_at - time.time(), 0)):
                await at_once(work, min(self._concurrency, len(found.starts)))
        except TimeoutError:
            batch.after = "expired"
        batch.after = batch.after or "completed"

    async def _write(self, batch: Batch, line: bytes) -> None:
        self.files.check_room(batch.owner, len(line))
        self._count(batch, len(line))
        await run_to_end(self._threads, partial(append, self._part(batch), line))

    def _app(self, endpoints: App, owner: str) -> App:
        """Return the application as a batch of an owner calls it."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            number = f"{secrets.token_hex(6)}{next(self._numbers):08x}"
            record = Record(number, "POST", scope["path"])

            async def send_on(message: Any) -> None:
                if message["type"] == "http.response.start":
                    record.status = record.status or message["status"]
                    named = (b"x-request-id", number.encode())
                    message["headers"] = [*message["headers"], named]
                await send(message)

            # Beside the requests of the key, in the order of the queue.
            scope["state"] = {
                "record": record,
                "client": f"batches of {owner or 'all'}",
            }
            try:
                await endpoints(scope, receive, send_on)
            finally:
                record.finish()
                record.write()

        return app

    async def _finalize(self, batch: Batch) -> None:
        """Store the answers and the errors, each as a file."""
        folder = self.files.folder
        good, bad = (folder / f"{batch.id}_{kind}.new" for kind in ("output", "error"))
        reason = EXPIRED if batch.after == "expired" else CANCELLED
        requests = self.files.path(batch.input_file_id)
        writing = partial(write_results, requests, self._part(batch), good, bad, reason)
        try:
            found = await run_to_end(self._threads, writing)
            batch.total = found.good + found.bad
            batch.completed, batch.failed = found.good, found.bad
            # At once from here on: a server that ends stores both files, or none.
            self._keep_no_more(batch)
            if found.good:
                size = found.good_bytes
                batch.output_file_id = self._store(batch, "output", good, size)
            if found.bad:
                batch.error_file_id = self._store(batch, "error", bad, found.bad_bytes)
        finally:
            good.unlink(missing_ok=True)
            bad.unlink(missing_ok=True)

    def _store(self, batch: Batch, kind: str, path: Path, size: int) -> str:
        name = f"{batch.id}_{kind}.jsonl"
        file = self.files.add(batch.owner, name, "batch_output", size, None)
        path.replace(self.files.path(file.id))
        self.files.finish(file)
        return file.id

    def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        batch.errors = errors
        self._keep_no_more(batch)
        self._part(batch).unlink(missing_ok=True)
        self._enter(batch, "failed")

    def _enter(self, batch: Batch, status: str) -> None:
        batch.status = status
        batch.times[f"{status}_at"] = int(time.time())
        self._save(batch)

    def _save(self, batch: Batch) -> None:
        self.files.save(batch.id, batch)
