"""Answers the requests of batches, one batch after the other."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inl.bounded_json import parse_object
from inl.errors import RequestError
from inl.serve.api_error import ApiError, as_api_error
from inl.serve.batch_calls import answer_all
from inl.serve.batch_file import (
    find_answers,
    index_requests,
    read_requests,
    unanswered,
)
from inl.serve.batches.batch import Batch
from inl.serve.request_log import Record

if TYPE_CHECKING:
    from inl.serve.batch_calls import App
    from inl.serve.batch_file import RequestIds
    from inl.serve.batches.file_store import FileStore, StoredFile

log = logging.getLogger("inl.serve")

MAX_REQUESTS = 50_000
"""Requests of a batch, as OpenAI's limit."""

MAX_BATCHES = 1000
"""Batches that are remembered; the oldest that have ended are forgotten."""

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
        self._changed = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._running: Batch | None = None
        self._numbers = itertools.count()

    def add(
        self, file: StoredFile, endpoint: str, metadata: dict[str, Any] | None
    ) -> Batch:
        """Queue a batch; raises :class:`ApiError` 400 if there are too many."""
        self._forget()
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
        self._save(batch)
        self._changed.set()
        return batch

    def _forget(self) -> None:
        if len(self._batches) < MAX_BATCHES:
            return
        oldest = next((each for each in self._ordered() if each.has_ended), None)
        if oldest is None:
            raise ApiError(
                400, f"batch: {MAX_BATCHES} have not ended; cancel one, or wait",
                code="storage_full",
            )  # fmt: skip
        del self._batches[oldest.id]
        (self.files.folder / f"{oldest.id}.json").unlink(missing_ok=True)

    def _ordered(self) -> list[Batch]:
        """Return all batches, the oldest first."""
        return [*self._batches.values()]

    def find(self, owner: str, name: str) -> Batch:
        """Return a batch of an owner; raises :class:`ApiError` 404."""
        batch = self._batches.get(name)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"batch: found no batch {name!r:.60}", param="batch_id")
        return batch

    def of(self, owner: str) -> Sequence[Batch]:
        """Return the batches of an owner, the newest first."""
        return [each for each in reversed(self._ordered()) if each.owner == owner]

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
        if batch is self._running and self._work is not None:
            self._work.cancel()
        self._changed.set()

    async def run(self, endpoints: App) -> None:
        """Answer all batches, until it is cancelled; they go on after a restart.

        endpoints: application without access control.
        """
        while True:
            self._changed.clear()
            batch = next((each for each in self._ordered() if not each.has_ended), None)
            if batch is None:
                await self._changed.wait()
                continue
            self._running = batch
            self._work = asyncio.create_task(self._run(batch, endpoints))
            try:
                await asyncio.wait([self._work])
            finally:
                self._running = None
                if not self._work.done():  # the server stops
                    self._work.cancel()
                    await asyncio.wait([self._work])
            if not self._work.cancelled() and (error := self._work.exception()):
                log.error("%s failed", batch.id, exc_info=error)
                self._fail(batch, [_error("server_error", as_api_error(error).message)])

    async def _run(self, batch: Batch, endpoints: App) -> None:
        """Bring a batch to its end, from whatever status it has."""
        part = self.files.folder / f"{batch.id}.part"
        if batch.status == "failed":
            return
        read = await self._requests(batch)
        if read is None:
            return
        requests, ids = read
        if batch.status in ("validating", "in_progress"):
            try:
                await self._answer(batch, ids, endpoints)
            except TimeoutError:
                batch.after = "expired"
            batch.after = batch.after or "completed"
        self._enter(batch, "finalizing")
        finished = await asyncio.to_thread(_answers_of, part)
        await self._finalize(batch, requests, finished)
        self._enter(batch, batch.after)
        self.files.extra_bytes = 0
        part.unlink(missing_ok=True)

    async def _requests(
        self, batch: Batch
    ) -> tuple[list[dict[str, Any]], RequestIds] | None:
        """Return the requests of a batch; ``None`` after a batch has failed."""
        path = self.files.path(batch.input_file_id)
        try:
            ids = await asyncio.to_thread(index_requests, path)
            requests = await asyncio.to_thread(lambda: list(read_requests(path)))
        except (OSError, RequestError) as error:
            text = str(error).replace(str(path), batch.input_file_id)
            self._fail(batch, [_error("invalid_file", text)])
            return None
        odd = [
            _error("mismatched_url", f"url {each['url']!r}, accepts {batch.endpoint!r}",
                   each["custom_id"])
            for each in requests
            if each["url"] != batch.endpoint
        ]  # fmt: skip
        if len(requests) > MAX_REQUESTS or not requests:
            text = f"found {len(requests)} requests, accepts 1 to {MAX_REQUESTS}"
            odd = [_error("invalid_request_count", text)]
        if odd:
            self._fail(batch, odd[:100])
            return None
        batch.total = len(requests)
        return requests, ids

    async def _answer(self, batch: Batch, ids: RequestIds, endpoints: App) -> None:
        """Answer what has no answer yet; raises TimeoutError after the window."""
        self._enter(batch, "in_progress")
        part = self.files.folder / f"{batch.id}.part"
        await asyncio.to_thread(find_answers, part, ids)
        todo = unanswered(self.files.path(batch.input_file_id), ids)
        batch.completed, batch.failed = ids.answered, 0
        self.files.extra_bytes = part.stat().st_size if part.exists() else 0
        with part.open("a", encoding="utf-8", errors="backslashreplace") as output:

            def write(answer: dict[str, Any]) -> None:
                text = json.dumps(answer, ensure_ascii=False) + "\n"
                self.files.extra_bytes += len(text)
                if self.files.free_bytes < 0:
                    raise RequestError("the files of this server have no room for more")
                output.write(text)
                output.flush()
                if answer["response"]["status_code"] == 200:
                    batch.completed += 1
                else:
                    batch.failed += 1

            seconds = max(batch.expires_at - time.time(), 0)
            async with asyncio.timeout(seconds):
                await answer_all(
                    self._app(endpoints, batch.owner), todo, write,
                    concurrency=lambda: self._concurrency,
                )  # fmt: skip

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

    async def _finalize(
        self,
        batch: Batch,
        requests: list[dict[str, Any]],
        finished: dict[str, dict[str, Any]],
    ) -> None:
        """Store the answers and the errors, each as a file."""
        reason = EXPIRED if batch.after == "expired" else CANCELLED
        # On threads, as what follows: there may be 50,000, of many megabytes.
        good, bad = await asyncio.to_thread(_divided, requests, finished, reason)
        batch.completed, batch.failed = len(good), len(bad)
        if good and batch.output_file_id is None:
            batch.output_file_id = await self._store(batch, "output", good)
        if bad and batch.error_file_id is None:
            batch.error_file_id = await self._store(batch, "error", bad)

    async def _store(
        self, batch: Batch, kind: str, lines: Sequence[dict[str, Any]]
    ) -> str:
        content = await asyncio.to_thread(_encoded, lines)
        self.files.extra_bytes = 0  # which these replace
        name = f"{batch.id}_{kind}.jsonl"
        file = self.files.add(batch.owner, name, "batch_output", len(content), None)
        await asyncio.to_thread(self.files.write, file.id, content)
        self.files.save(file.id, file)
        return file.id

    def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        batch.errors = errors
        self.files.extra_bytes = 0
        (self.files.folder / f"{batch.id}.part").unlink(missing_ok=True)
        self._enter(batch, "failed")

    def _enter(self, batch: Batch, status: str) -> None:
        batch.status = status
        batch.times[f"{status}_at"] = int(time.time())
        self._save(batch)

    def _save(self, batch: Batch) -> None:
        self.files.save(batch.id, batch)


def _divided(
    requests: Sequence[dict[str, Any]],
    finished: dict[str, dict[str, Any]],
    reason: dict[str, str],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the answers of requests, and the errors; of no answer with a reason."""
    good, bad = [], []
    for request in requests:
        custom = request["custom_id"]
        answer = finished.get(custom)
        if answer is None:
            line = {"id": f"batch_req_{secrets.token_hex(10)}", "custom_id": custom}
            bad.append({**line, "response": None, "error": reason})
        elif answer["response"]["status_code"] == 200:
            good.append(answer)
        else:
            bad.append(answer)
    return good, bad


def _encoded(lines: Sequence[dict[str, Any]]) -> bytes:
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return data.encode("utf-8", "backslashreplace")


def _error(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": None}


def _answers_of(path: Any) -> dict[str, dict[str, Any]]:
    """Return the answers of a file by the id of the request."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        lines = [
            parse_object(line, path.name, max_bytes=len(line.encode()))
            for line in file
            if line.endswith("\n")
        ]
    return {line["custom_id"]: line for line in lines}
