"""Files and batches through the unmodified ``openai`` client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
from starlette.requests import Request

from http_servers import HashServer, hash_engine
from inl.errors import RequestError
from inl.serve.api_error import ApiError
from inl.serve.batches import batch_queue
from inl.serve.batches.batch_lines import MAX_SHOWN
from inl.serve.batches.batch_queue import BatchQueue
from inl.serve.batches.endpoints import PART_BYTES, Batches
from inl.serve.batches.file_store import FileStore
from inl.serve.batches.multipart import Part, parse_form
from inl.serve.batches.places import Places
from inl.serve.settings import ServerConfig
from waiting import until

PATH = "/v1/completions"
WINDOW = "24h"


def line_of(number, url=PATH, **fields):
    body = {"prompt": [number, 1, 2], "max_tokens": 4, "ignore_eos": True, "seed": 1}
    body |= {"return_token_ids": True, "temperature": 1.0, **fields}
    return {"custom_id": f"no {number}", "method": "POST", "url": url, "body": body}


def jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "store"
    with HashServer(max_batch=4, files=str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


NO_MODELS = SimpleNamespace(is_draining=False, clients=Counter())


def stored_file(store, data, owner="", seconds=None):
    file = store.add(owner, "a", "batch", len(data), seconds)
    store.write(file.id, data)
    store.finish(file)
    return file


def upload(client, lines, name="in.jsonl"):
    return client.files.create(file=(name, jsonl(lines)), purpose="batch")


def finished(client, batch):
    """Return a batch once it has ended."""
    ended = ("completed", "failed", "expired", "cancelled")
    until(lambda: client.batches.retrieve(batch.id).status in ended)
    return client.batches.retrieve(batch.id)


def start(client, file, endpoint=PATH, **options):
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=WINDOW, **options
    )


def lines_of(client, file_id):
    text = client.files.content(file_id).text
    return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


def test_a_file_is_stored_listed_read_and_deleted(client):
    data = b'{"a": "\xc3\xa9\r\n--x"}\r\n\r\n\x00'
    file = client.files.create(file=('of "a".jsonl', data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (
        len(data), 'of "a".jsonl', "batch",
    )  # fmt: skip
    assert (file.object, file.status) == ("file", "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert file.id in [each.id for each in client.files.list(purpose="batch")]
    assert not list(client.files.list(purpose="batch_output", limit=1))
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_file_is_sent_in_parts_as_the_client_takes_them(tmp_path):
    """A stored file may be larger than the memory, and be asked for many times."""
    files = FileStore(tmp_path / "store", 1 << 30)
    data = bytes(range(256)) * (3 * PART_BYTES // 256) + b"end"
    stored = stored_file(files, data)
    batches = Batches(BatchQueue(files, concurrency=1), NO_MODELS, ServerConfig())
    scope = {"type": "http", "method": "GET", "headers": [], "query_string": b""}
    scope |= {"path_params": {"name": stored.id}, "state": {"client": ""}}
    taken, sent = threading.Event(), []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        if len(sent) == 2:  # the head, and the first part
            files.delete(stored)
            assert len(message["body"]) == PART_BYTES
            taken.set()
        assert taken.is_set() or len(sent) == 1

    async def get():
        request = Request(scope, receive)
        response = await batches.content(request)
        await response(scope, receive, send)

    asyncio.run(get())
    files.close()
    parts = [message["body"] for message in sent[1:]]
    assert b"".join(parts) == data
    assert max(map(len, parts)) == PART_BYTES
    assert (b"content-length", str(len(data)).encode()) in sent[0]["headers"]


def test_answers_are_put_together_on_threads(client, monkeypatch):
    """Of a large batch it takes seconds, in which the event loop serves others."""
    threads = {}
    names = ("plan", "request_at", "append", "write_results")
    for name in names:
        work = getattr(batch_queue, name)

        def noted(*given, name=name, work=work):
            threads[name] = threading.current_thread(), asyncio._get_running_loop()
            return work(*given)

        monkeypatch.setattr(batch_queue, name, noted)
    batch = finished(client, start(client, upload(client, [line_of(1)])))
    assert batch.status == "completed"
    assert threads.keys() == set(names)
    assert {thread.name[:11] for thread, _ in threads.values()} == {"inl-batches"}
    assert all(loop is None for _, loop in threads.values())


def test_pages_of_files_are_followed(client):
    made = [upload(client, [], f"{at}").id for at in range(5)]
    listed = [each.id for each in client.files.list(limit=2)]
    assert set(made) <= set(listed)
    assert len(set(listed)) == len(listed)
    for name in made:
        client.files.delete(name)


def test_the_answers_of_a_batch_are_the_engines(client):
    lines = [line_of(at) for at in range(5)]
    lines[3]["body"]["stop"] = 7  # refused by its schema
    file = upload(client, lines)
    batch = start(client, file, metadata={"of": "a test"})
    assert batch.status in ("validating", "in_progress", "finalizing", "completed")
    batch = finished(client, batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    assert batch.metadata == {"of": "a test"}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at
    assert batch.finalizing_at <= batch.completed_at
    good = lines_of(client, batch.output_file_id)
    with hash_engine(4) as twin:
        for number in (0, 1, 2, 4):
            wanted = twin.generate(
                [number, 1, 2], max_tokens=4, ignore_eos=True, seed=1, temperature=1.0
            )
            body = good.pop(f"no {number}")["response"]["body"]
            assert tuple(body["choices"][0]["token_ids"]) == wanted.token_ids
    assert not good
    ((name, line),) = lines_of(client, batch.error_file_id).items()
    assert (name, line["response"]["status_code"]) == ("no 3", 400)
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    client.files.delete(file.id)


def test_chats_and_responses_are_batched_too(client):
    turn = [{"role": "user", "content": "Hi"}]
    bodies = {
        "/v1/chat/completions": {"messages": turn, "max_tokens": 3},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    }
    for url, body in bodies.items():
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        batch = finished(client, start(client, upload(client, [line]), url))
        assert batch.status == "completed", batch
        response = lines_of(client, batch.output_file_id)["a"]["response"]
        assert response["status_code"] == 200
        assert response["body"].get("store", False) is False, "nobody can name it"


BAD = {
    "no JSON": (b"{", "line 1"),
    "equal ids": (jsonl([line_of(1), line_of(1)]), "line 2"),
    "another endpoint": (jsonl([line_of(1, "/v1/embeddings")]), "/v1/embeddings"),
    "empty": (b"\n", "found 0 requests"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_fails_its_batch(server, client, name):
    data, said = BAD[name]
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = finished(client, start(client, file))
    assert batch.status == "failed"
    (error,) = batch.errors.data
    assert said in error.message
    assert server.config.files not in error.message


REFUSED = {
    "purpose": lambda client: client.files.create(file=b"a", purpose="fine-tune"),
    "file_id": lambda client: client.files.retrieve("file-../../etc/passwd"),
    "batch_id": lambda client: client.batches.retrieve("batch_0"),
    "endpoint": lambda client: start(client, upload(client, []), "/v1/models"),
    "limit": lambda client: client.files.list(limit=0),
    "limit ": lambda client: client.files.list(limit=int("9" * 4000)),
    "after": lambda client: client.batches.list(after="x"),
    "expires_after": lambda client: client.files.create(
        file=b"a", purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 1}),
    "completion_window": lambda client: client.batches.create(
        input_file_id="a", endpoint=PATH, completion_window="1h"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_accepted_is_refused_by_name(client, name):
    with pytest.raises(openai.APIStatusError) as caught:
        REFUSED[name](client)
    assert caught.value.status_code in (400, 404)
    assert name == "file_id" or caught.value.param == name.strip()


def test_a_file_can_expire(client):
    after = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=b"a", purpose="batch", expires_after=after)
    assert file.expires_at == file.created_at + 3600


def test_an_expired_file_is_deleted(tmp_path):
    store = FileStore(tmp_path / "a", 100)
    file = stored_file(store, b"x", seconds=-1)
    with pytest.raises(ApiError):
        store.find("", file.id)
    assert not store.path(file.id).exists()


def test_a_cancelled_batch_keeps_what_was_answered(tmp_path):
    with HashServer(max_batch=2, files=str(tmp_path)) as slow:
        with client_of(slow) as client, slow.paused() as gate:
            gate.hold_after(30)  # of 8 for each request, one after the other
            lines = [line_of(at, max_tokens=8) for at in range(40)]
            file = upload(client, lines)
            batch, second = start(client, file), start(client, file)
            until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
            with pytest.raises(openai.ConflictError):
                client.files.delete(file.id)
            client.batches.cancel(second.id)
            assert client.batches.cancel(batch.id).status == "cancelling"
            gate.release()
            found = finished(client, batch)
            assert found.status == finished(client, second).status == "cancelled"
            good = lines_of(client, found.output_file_id)
            bad = lines_of(client, found.error_file_id)
            assert good
            assert bad
            assert len(good) + len(bad) == 40
            assert {each["error"]["code"] for each in bad.values()} == {
                "batch_cancelled"
            }
            with pytest.raises(openai.ConflictError):
                client.batches.cancel(batch.id)
        slow.wait_idle()


def test_a_batch_goes_on_after_a_restart(tmp_path):
    lines = [line_of(at, max_tokens=8) for at in range(12)]
    with (
        HashServer(max_batch=2, files=str(tmp_path)) as first,
        client_of(first) as client,
        first.paused() as gate,
    ):
        gate.hold_after(30)  # of 8 for each request, one after the other
        batch = start(client, upload(client, lines))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 1)
        first.stop()
        until(lambda: first.server._batching.done())
    (part,) = tmp_path.glob("*.part")
    before = part.read_bytes().splitlines()
    assert 1 < len(before) < 12
    with (
        HashServer(max_batch=4, files=str(tmp_path)) as second,
        client_of(second) as client,
    ):
        found = finished(client, batch)
        assert (found.status, found.request_counts.completed) == ("completed", 12)
        data = client.files.content(found.output_file_id).content
        assert set(before) <= set(data.splitlines()), "none was asked again"
        assert len(lines_of(client, found.output_file_id)) == 12
    assert not list(tmp_path.glob("*.part"))


def test_what_is_not_answered_within_the_window_expires(tmp_path, monkeypatch):
    monkeypatch.setattr("inl.serve.batches.batch_queue.WINDOW_SECONDS", 0)
    with (
        HashServer(max_batch=2, files=str(tmp_path)) as server,
        client_of(server) as client,
    ):
        batch = finished(client, start(client, upload(client, [line_of(1)])))
        assert (batch.status, batch.output_file_id) == ("expired", None)
        (line,) = lines_of(client, batch.error_file_id).values()
        assert line["error"]["code"] == "batch_expired"


def test_each_key_has_files_and_batches_of_its_own(tmp_path):
    folder = str(tmp_path)
    with (
        HashServer(files=folder, api_keys=("a", "b")) as server,
        client_of(server, "a") as mine,
        client_of(server, "b") as other,
    ):
        file = upload(mine, [line_of(1)])
        batch = finished(mine, start(mine, file))
        assert batch.status == "completed"
        for call in (
            lambda: other.files.content(file.id),
            lambda: other.files.delete(file.id),
            lambda: start(other, file),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert not list(other.files.list())
        assert not list(other.batches.list())
    with (
        HashServer(files=folder, api_keys=("b", "a")) as server,  # another order
        client_of(server, "a") as mine,
        client_of(server, "b") as other,
    ):
        assert mine.files.retrieve(file.id).id == file.id
        assert not list(other.files.list())
    assert b'"a"' not in b"".join(p.read_bytes() for p in tmp_path.glob("file-*.json"))


def test_the_room_for_files_is_bounded(tmp_path):
    with (
        HashServer(files=str(tmp_path), max_file_bytes=1000) as server,
        client_of(server) as client,
    ):
        file = client.files.create(file=b"x" * 900, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="max-file-bytes"):
            client.files.create(file=b"x" * 101, purpose="batch")
        client.files.delete(file.id)
        # The answers of a batch need room too.
        batch = finished(
            client, start(client, upload(client, [line_of(1), line_of(2)]))
        )
        assert batch.status == "failed"
        assert "no room" in batch.errors.data[0].message


def test_a_key_takes_no_room_from_others(tmp_path):
    """Bytes, files and batches are divided between the keys."""
    with (
        HashServer(
            files=str(tmp_path), max_file_bytes=2000, api_keys=("a", "b")
        ) as server,
        client_of(server, "a") as mine,
        client_of(server, "b") as other,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            mine.files.create(file=b"x" * 1001, purpose="batch")
        assert caught.value.code == "storage_full"
        assert "a key may have 1000 bytes together" in caught.value.message
        full = mine.files.create(file=b"x" * 1000, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="max-file-bytes-per-key"):
            mine.files.create(file=b"x", purpose="batch")
        file = other.files.create(file=b"x" * 1000, purpose="batch")
        assert [each.id for each in mine.files.list()] == [full.id]
        assert [each.id for each in other.files.list()] == [file.id]


def test_the_room_of_a_key_can_be_set(tmp_path):
    with (
        HashServer(
            files=str(tmp_path), max_file_bytes=100, max_file_bytes_per_key=80,
            api_keys=("a", "b"),
        ) as server,
        client_of(server, "a") as mine,
        client_of(server, "b") as other,
    ):  # fmt: skip
        mine.files.create(file=b"x" * 80, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="this server may have 100"):
            other.files.create(file=b"x" * 21, purpose="batch")
        other.files.create(file=b"x" * 20, purpose="batch")


def test_the_number_of_files_of_a_key_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("inl.serve.batches.file_store.MAX_FILES", 4)
    store = FileStore(tmp_path, 100, keys=2)
    for owner in ("a", "b"):
        file = stored_file(store, b"x", owner)
        stored_file(store, b"x", owner)
        with pytest.raises(ApiError, match="a key may store 2 of the 4 files"):
            stored_file(store, b"x", owner)
        store.delete(file)
        stored_file(store, b"x", owner)
    # Files of a key that the server had before.
    store.close()
    store = FileStore(tmp_path, 100, keys=1)
    with pytest.raises(ApiError, match="this server stores 4 files"):
        stored_file(store, b"x", "c")


def test_the_number_of_open_batches_of_a_key_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("inl.serve.batches.batch_queue.MAX_BATCHES", 5)
    store = FileStore(tmp_path, 1000, keys=2)
    queue = BatchQueue(store, concurrency=1)
    for owner in ("a", "b"):
        file = stored_file(store, b"x", owner)
        first, second = (queue.add(file, PATH, None) for _ in range(2))
        with pytest.raises(ApiError, match="2 of this key that have not ended"):
            queue.add(file, PATH, None)
        first.status = "completed"
        third = queue.add(file, PATH, None)
        assert queue.of(owner) == [third, second], "the one that has ended is forgotten"


def test_a_batch_keeps_places_for_its_files(tmp_path, monkeypatch):
    """It would fail after all of its requests have been answered."""
    monkeypatch.setattr("inl.serve.batches.file_store.MAX_FILES", 4)
    store = FileStore(tmp_path, 1000)
    queue = BatchQueue(store, concurrency=1)
    file = stored_file(store, b"x")
    batch = queue.add(file, PATH, None)
    stored_file(store, b"x")
    with pytest.raises(ApiError, match="this server stores 4 files"):
        stored_file(store, b"x")
    with pytest.raises(ApiError, match="this server stores 4 files"):
        queue.add(file, PATH, None)
    store.close()
    store = FileStore(tmp_path, 1000)
    queue = BatchQueue(store, concurrency=1)
    with pytest.raises(ApiError, match="this server stores 4 files"):
        stored_file(store, b"x")
    queue.cancel(queue.find("", batch.id))
    run_queue(queue, None, lambda: queue.find("", batch.id).has_ended)
    stored_file(store, b"x")


def run_queue(queue, app, is_done):
    """Answer batches with an application until a condition holds."""

    async def run():
        async with asyncio.timeout(300):
            work = asyncio.create_task(queue.run(app))
            while not is_done():
                await asyncio.sleep(0.001)
            work.cancel()
            await asyncio.wait([work])

    asyncio.run(run())


async def respond(send, status=200, body=b"{}"):
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_batches_of_keys_do_not_wait_for_each_other(tmp_path):
    """The request of the older batch is answered once the other batch has ended."""
    store = FileStore(tmp_path, 1 << 20, keys=2)
    queue = BatchQueue(store, concurrency=2)
    batches = {
        owner: queue.add(
            stored_file(store, jsonl(map(line_of, range(count))), owner), PATH, None
        )
        for owner, count in (("a", 1), ("b", 5))
    }

    async def app(scope, receive, send):
        while scope["state"]["client"] == "batches of a" and not (
            batches["b"].has_ended
        ):
            await asyncio.sleep(0.001)
        await respond(send)

    run_queue(queue, app, lambda: batches["a"].has_ended)
    assert {each.status for each in batches.values()} == {"completed"}
    assert [each.completed for each in batches.values()] == [1, 5]


def test_keys_get_places_in_turns():
    """A place goes to the key that holds the fewest, however many requests wait."""
    order = []

    async def request(places, owner):
        async with places.place(owner):
            order.append(owner)
            await asyncio.sleep(0)

    async def run(count, owners):
        order.clear()
        places = Places(count)
        await asyncio.gather(*(request(places, owner) for owner in owners))
        return "".join(order)

    assert asyncio.run(run(1, "aaaaabbbc")) == "aabcababa"
    assert asyncio.run(run(2, "aaaaaaaabbbbc")) == "aabacbababaaa"


def test_a_place_that_was_waited_for_is_not_lost():
    async def run():
        places = Places(1)

        async def hold(owner, event):
            async with places.place(owner):
                await event.wait()

        end = asyncio.Event()
        first = asyncio.create_task(hold("a", end))
        waiting = [asyncio.create_task(hold(owner, end)) for owner in "abb"]
        await asyncio.sleep(0)
        waiting[1].cancel()
        first.cancel()
        await asyncio.wait([first])
        # It has got the place, and is told so only after it is cancelled.
        for task in waiting[::2]:
            task.cancel()
        await asyncio.wait(waiting)
        async with asyncio.timeout(60), places.place("c"):
            """There is a place."""

    asyncio.run(run())


def test_a_file_is_listed_once_it_is_whole(tmp_path, monkeypatch):
    began, go = threading.Event(), threading.Event()
    write = FileStore.write

    def slowly(self, name, data):
        began.set()
        assert go.wait(300)
        write(self, name, data)

    monkeypatch.setattr(FileStore, "write", slowly)
    with (
        HashServer(files=str(tmp_path), max_file_bytes=10) as server,
        client_of(server) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        created = threads.submit(
            client.files.create, file=b"0123456789", purpose="batch"
        )
        try:
            assert began.wait(300)
            assert not list(client.files.list())
            # Its bytes are counted meanwhile.
            with pytest.raises(openai.BadRequestError, match="no room for 1 bytes"):
                client.files.create(file=b"x", purpose="batch")
        finally:
            go.set()
        file = created.result()
        assert [each.id for each in client.files.list()] == [file.id]


def test_what_an_ended_server_was_writing_is_deleted(tmp_path):
    store = FileStore(tmp_path, 100)
    file = stored_file(store, b"x")
    unfinished = store.add("", "b", "batch", 50, None)
    store.write(unfinished.id, b"y" * 50)
    (tmp_path / f"{file.id}.json.new").write_bytes(b"{")
    (tmp_path / f"batch_{'0' * 24}_output.new").write_bytes(b"{")
    others = [tmp_path / name for name in ("file-mine.data", "notes.new")]
    for path in others:
        path.write_bytes(b"of somebody else")
    store.close()
    store = FileStore(tmp_path, 100)
    assert [each.id for each in store.of("")] == [file.id]
    assert not store.path(unfinished.id).exists()
    assert list(tmp_path.glob("*.new")) == others[1:]
    assert others[0].exists()
    stored_file(store, b"z" * 99)


def test_a_file_does_not_expire_while_a_batch_needs_it(tmp_path):
    store = FileStore(tmp_path, 1000)
    queue = BatchQueue(store, concurrency=1)
    file = stored_file(store, jsonl([line_of(1)]), seconds=-1)
    batch = queue.add(file, PATH, None)
    assert store.find("", file.id) == file

    async def app(scope, receive, send):
        await respond(send)

    run_queue(queue, app, lambda: batch.has_ended)
    assert batch.status == "completed"
    with pytest.raises(ApiError):
        store.find("", file.id)


def test_a_refused_batch_keeps_little_of_its_file(tmp_path):
    store = FileStore(tmp_path, 1 << 20)
    queue = BatchQueue(store, concurrency=1)
    lines = [line_of(at, "/v1/embeddings") for at in range(200)]
    lines[0]["custom_id"] = "x" * 100_000
    batch = queue.add(stored_file(store, jsonl(lines)), PATH, None)
    run_queue(queue, None, lambda: batch.has_ended)
    assert batch.status == "failed"
    assert len(batch.errors) == 100
    assert batch.errors[0]["param"] == "x" * MAX_SHOWN


def test_errors_of_a_cancelled_batch_are_kept(tmp_path):
    store = FileStore(tmp_path, 1 << 20)
    queue = BatchQueue(store, concurrency=1)
    batch = queue.add(stored_file(store, jsonl(map(line_of, range(9)))), PATH, None)

    async def app(scope, receive, send):
        if batch.failed:
            queue.cancel(batch)
            await asyncio.Event().wait()
        await respond(send, 400, b'{"error":\n"\xc3\xa9"}')

    run_queue(queue, app, lambda: batch.has_ended)
    assert (batch.status, batch.failed) == ("cancelled", 9)
    lines = store.path(batch.error_file_id).read_bytes().splitlines()
    first, *others = map(json.loads, lines)
    assert first["response"]["status_code"] == 400
    assert first["response"]["body"] == {"error": "é"}
    assert {each["error"]["code"] for each in others} == {"batch_cancelled"}
    assert len(others) == 8


def test_only_the_owner_of_the_process_can_read_the_folder(tmp_path):
    folder = tmp_path / "files"
    with HashServer(files=str(folder)) as server, client_of(server) as client:
        upload(client, [line_of(1)])
    modes = {path.stat().st_mode & 0o077 for path in folder.glob("file-*")}
    assert modes == {0}
    assert folder.stat().st_mode & 0o077 == 0


def test_a_folder_has_one_server(tmp_path):
    store = FileStore(tmp_path, 100)
    with pytest.raises(RequestError, match="another server uses it"):
        FileStore(tmp_path, 100)
    store.close()
    FileStore(tmp_path, 100).close()


def test_a_damaged_record_is_left_out(tmp_path, caplog):
    (tmp_path / "file-1.json").write_bytes(b"{")
    assert not FileStore(tmp_path, 100).of("")
    assert "file-1.json: left out" in caplog.text


def test_without_a_folder_the_endpoints_say_so(hash_server):
    for method, path in (("GET", "files"), ("POST", "batches"), ("GET", "files/a/b")):
        found = httpx.request(method, f"{hash_server.url}/v1/{path}", timeout=300)
        assert found.status_code == 404
        assert "--files FOLDER" in found.json()["error"]["message"]


KIND = "multipart/form-data; boundary=xx"
MALFORMED = {
    "another type": ("application/json", b"{}"),
    "no boundary": ("multipart/form-data", b"--xx--"),
    "no end": (KIND, b'--xx\r\ncontent-disposition: form-data; name="a"\r\n\r\nb'),
    "no headers": (KIND, b"--xx\r\nab\r\n--xx--"),
    "no name": (KIND, b"--xx\r\ncontent-type: a\r\n\r\nb\r\n--xx--"),
    "many parts": (KIND, b"--xx\r\n" * 100 + b"--xx--"),
    "before the first": (KIND, b"a\r\n--xx--"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_form_is_refused(name):
    with pytest.raises(ApiError, match="accepts multipart/form-data"):
        parse_form(*MALFORMED[name])


def test_a_form_is_read():
    lines = [b"--xx", b'Content-Disposition: form-data; name="a"', b"", b"1", b"--xx",
             b'content-disposition: form-data; filename="%22.txt"; name="f"',
             b"content-type: text/plain", b"", b"\r\n--x", b"--xx--", b""]  # fmt: skip
    found = parse_form('multipart/form-data; boundary="xx"', b"\r\n".join(lines))
    assert found == {"a": Part(None, b"1"), "f": Part('".txt', b"\r\n--x")}


@pytest.mark.full
def test_front_ends_pass_files_and_batches_on(tmp_path):
    with (
        HashServer(max_batch=4, files=str(tmp_path), frontends=2) as server,
        client_of(server) as client,
    ):
        batch = finished(client, start(client, upload(client, [line_of(1)])))
        assert batch.status == "completed"
        assert len(lines_of(client, batch.output_file_id)) == 1
