"""``inl run-batch``: every request is answered once, whenever it was interrupted."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time

import pytest

from http_servers import hash_engine
from inl.cli.main import main
from inl.config import EngineConfig
from inl.errors import RequestError
from inl.serve.batch_calls import run_batch
from inl.serve.batch_file import (
    find_answers,
    index_requests,
    only_run,
    read_requests,
    unanswered,
)
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig

PATH = "/v1/completions"


def line_of(number, **options):
    body = {"prompt": [number, 1, 2], "max_tokens": 4, "ignore_eos": True, "seed": 1}
    request = {"custom_id": f"no {number} é\u2028", "method": "POST", "url": PATH}
    return {**request, "body": {**body, "return_token_ids": True, **options}}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


async def echo(scope, receive, send):
    """Answer with the request's prompt, without a model."""
    body = json.loads((await receive())["body"])
    await asyncio.sleep(0)
    start = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": [(b"x-request-id", b"7")]})
    data = json.dumps({"prompt": body["prompt"], "text": "é\n\u2028"}).encode()
    await send({"type": "http.response.body", "body": data})


def run(app, requests, path, concurrency=3):
    """Do what the command does; returns how many it sent, and how many failed."""
    ids = index_requests(requests)
    find_answers(path, ids)
    with path.open("a", encoding="utf-8") as output:
        failed = answer(app, unanswered(requests, ids), output, concurrency)
    return len(ids) - ids.answered, failed


def answer(app, requests, output, concurrency):
    async def work():
        return await run_batch(
            app, requests, output, concurrency=lambda: concurrency, tick=lambda: None
        )

    return asyncio.run(work())


def answers(path):
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"] for line in lines}


def test_a_file_cut_at_any_byte_is_completed_without_a_loss(tmp_path, depth):
    requests = write(tmp_path / "in.jsonl", map(line_of, range(5)))
    path = tmp_path / "out.jsonl"
    assert run(echo, requests, path) == (5, 0)
    whole, wanted = path.read_bytes(), answers(path)
    assert len(wanted) == 5
    assert all(each["status_code"] == 200 for each in wanted.values())
    for cut in range(0, len(whole) + 1, depth(9, 2)):
        path.write_bytes(whole[:cut])
        assert run(echo, requests, path) == (5 - whole[:cut].count(b"\n"), 0)
        assert answers(path) == wanted, cut
    assert run(echo, requests, path) == (0, 0)


@pytest.mark.parametrize(
    "text", ["x", '{"custom_id": "a"}\n', "[1]\n", '{"custom_id": "a", "body": {}}\ny']
)
def test_a_file_that_is_not_of_answers_is_left_alone(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match="line 1: found"):
        find_answers(path, index_requests(write(tmp_path / "in.jsonl", [line_of(0)])))
    assert path.read_text() == text


def test_an_answer_may_be_longer_than_a_request(tmp_path, monkeypatch):
    requests = write(tmp_path / "in.jsonl", map(line_of, range(3)))
    path = tmp_path / "out.jsonl"
    assert run(echo, requests, path) == (3, 0)
    whole, ids = path.read_bytes(), index_requests(requests)
    monkeypatch.setattr("inl.serve.batch_file.MAX_LINE", 50)
    find_answers(path, ids)
    assert (ids.answered, path.read_bytes()) == (3, whole)


BAD = {
    "no JSON": ["{"],
    "no id": [json.dumps({"url": PATH, "body": {}})],
    "no body": [json.dumps({"custom_id": "a", "url": PATH, "body": 3})],
    "other url": [json.dumps({"custom_id": "a", "url": "/v1/files", "body": {}})],
    "equal ids": [json.dumps({"custom_id": "a", "url": PATH, "body": {}})] * 2,
}


def test_a_file_may_begin_with_the_mark_of_utf_8(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line_of(1)) + "\r\n", "utf-8-sig")
    assert [each["custom_id"] for each in read_requests(path)] == ["no 1 é\u2028"]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_before_anything_runs(tmp_path, name):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(BAD[name]))
    with pytest.raises(RequestError, match=f"line {len(BAD[name])}: "):
        index_requests(path)


def test_more_requests_than_the_queue_holds_are_answered(tmp_path):
    """Two of three completions at a time: the others wait, and none is refused."""
    requests = write(tmp_path / "in.jsonl", [line_of(at, n=3) for at in range(6)])
    config = ServerConfig(max_queue=1)

    def open_engine(on_step):
        settings = engine_config(EngineConfig(), config, 4)
        return hash_engine(4, config=settings, on_step=on_step)

    output = io.StringIO()
    with Server([ModelSource("hash", open_engine)], config, max_batch=4) as server:
        todo = list(read_requests(requests))
        todo[3]["body"]["stop"] = 7  # refused by its schema

        async def given():
            for each in todo:
                yield each

        assert answer(server.app, given(), output, 6) == 1
    lines = [json.loads(line) for line in output.getvalue().split("\n")[:-1]]
    by_id = {line["custom_id"]: line["response"] for line in lines}
    assert sorted(by_id) == [line_of(at)["custom_id"] for at in range(6)]
    with hash_engine(4) as twin:
        for number, request in enumerate(todo):
            response = by_id[request["custom_id"]]
            if number == 3:
                assert response["status_code"] == 400
                continue
            done = twin.generate(
                [number, 1, 2], max_tokens=4, ignore_eos=True, seed=1, n=3,
                temperature=1.0,
            )  # fmt: skip
            wanted = [done.token_ids, *(each.token_ids for each in done.alternatives)]
            found = [tuple(each["token_ids"]) for each in response["body"]["choices"]]
            assert found == wanted


@pytest.mark.full
def test_a_run_that_was_killed_continues(tmp_path):
    lines = [line_of(at, prompt="A short story:", seed=at) for at in range(24)]
    requests = write(tmp_path / "in.jsonl", lines)

    def command(path):
        words = ["-m", "inl", "run-batch", requests, path, "--device", "cpu"]
        return [sys.executable, *map(str, words), "--max-batch", "2"]

    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    subprocess.run(command(whole), check=True)

    def kill_a_run():
        """Return how many requests it has answered."""
        path.unlink(missing_ok=True)
        with subprocess.Popen(command(path)) as process:
            while not path.exists() or path.read_bytes().count(b"\n") < 4:
                if process.poll() is not None:
                    break
                time.sleep(0.005)
            process.kill()  # if it has not ended
        return path.read_bytes().count(b"\n")

    # A busy machine may run this process again only after the last answer.
    count = next(each for each in (kill_a_run() for _ in range(20)) if each < 24)
    before = path.read_bytes()
    with path.open("ab") as file:  # as an interrupted write leaves it
        file.write(b"" if not before.endswith(b"\n") else before[:40])
    done = subprocess.run(command(path), check=True, capture_output=True, text=True)
    assert f"{count} answered before" in done.stderr
    assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])

    def tokens(path):
        return {
            name: response["body"]["choices"][0]["token_ids"]
            for name, response in answers(path).items()
        }

    assert tokens(path) == tokens(whole)
    assert len(tokens(path)) == 24


def test_the_command_quantizes(tmp_path, monkeypatch):
    requests, found = write(tmp_path / "in.jsonl", [line_of(0)]), []

    def stop(models, server, config):
        found.append(config.quantize)
        raise RequestError("stopped")

    monkeypatch.setattr("inl.cli.run_batch.make_server", stop)
    words = ["run-batch", str(requests), str(tmp_path / "out.jsonl")]
    assert main([*words, "--quantize", "int4"]) == 2
    assert main(words) == 2
    assert found == ["int4", None]


def test_the_command_bounds_the_context_and_loads_adapters(tmp_path, monkeypatch):
    given = []

    def record(models, config, engine):
        given.append(engine)
        raise RequestError("recorded")

    monkeypatch.setattr("inl.cli.run_batch.make_server", record)
    monkeypatch.setattr("inl.adapters.folder.highest_rank", lambda folder: 24)
    requests = str(write(tmp_path / "in.jsonl", [line_of(0)]))
    words = ["run-batch", requests, str(tmp_path / "out.jsonl"), "--context", "77"]
    assert main([*words, "--adapter", "mine=folder", "--speculation", "ngram"]) == 2
    (engine,) = given
    assert (engine.context, engine.adapters) == (77, {"mine": "folder"})
    assert (engine.max_adapter_rank, engine.speculation) == (24, "ngram")


REFUSED = {
    "deep": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "half of a pair": json.dumps({**line_of(1), "custom_id": "\ud800"}),
    "half of a pair in the body": json.dumps(line_of(1, user="\udc00")),
    "NaN": json.dumps(line_of(1, temperature=float("nan"))),
    "many digits": json.dumps(line_of(1)).replace('"seed": 1', '"seed": ' + "1" * 5000),
    "a list": "[1]",
    "a number": "3",
    "null": "null",
    "an id of an object": json.dumps({**line_of(1), "custom_id": {}}),
    "a url of a list": json.dumps({**line_of(1), "url": [PATH]}),
    "no UTF-8": b'{"custom_id": "\xff", "url": "/v1/completions", "body": {}}',
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_that_cannot_be_read_is_refused_by_its_number(tmp_path, name):
    odd = REFUSED[name]
    odd = odd if isinstance(odd, bytes) else odd.encode()
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [json.dumps(line_of(at)).encode() for at in (5, 6)]
    path.write_bytes(b"\n\n".join([good[0], odd, good[1]]))
    with pytest.raises(RequestError, match="line 3: "):
        index_requests(path)
    assert main(["run-batch", str(path), str(out)]) == 2
    assert not out.exists()


def test_failed_requests_run_again_and_their_lines_are_replaced(tmp_path):
    requests = write(tmp_path / "in.jsonl", map(line_of, range(4)))
    path = tmp_path / "out.jsonl"
    failing = {1, 3}

    async def app(scope, receive, send):
        message = await receive()
        number = json.loads(message["body"])["prompt"][0]
        if number == 3 and number in failing:
            raise MemoryError("no room")

        async def again():
            return message

        async def answer(part):
            if part["type"] == "http.response.start" and number in failing:
                part = {**part, "status": 500}
            await send(part)

        await echo(scope, again, answer)

    def once():
        return run(app, requests, path, concurrency=2)

    assert once() == (4, 2)
    status = {name[:4]: each["status_code"] for name, each in answers(path).items()}
    assert status == {"no 0": 200, "no 1": 500, "no 2": 200, "no 3": 500}
    assert once() == (2, 2)
    assert len(answers(path)) == 4
    failing.clear()
    assert once() == (2, 0)
    assert [each["status_code"] for each in answers(path).values()] == [200] * 4
    assert once() == (0, 0)


def test_what_cannot_be_encoded_is_escaped(tmp_path, monkeypatch):
    """The file that the command opens takes half of a surrogate pair as JSON does."""
    requests, path = write(tmp_path / "in.jsonl", [line_of(0)]), tmp_path / "out.jsonl"

    class Fake:
        app = None

        def __enter__(self):
            return self

        def __exit__(self, *_):
            """Nothing to close."""

    async def write_half(app, lines, output, **_):
        output.write(json.dumps({"a": "\ud83d é"}, ensure_ascii=False) + "\n")
        return 0

    monkeypatch.setattr("inl.cli.run_batch.make_server", lambda *_: Fake())
    monkeypatch.setattr("inl.serve.batch_calls.run_batch", write_half)
    assert main(["run-batch", str(requests), str(path)]) == 0
    assert json.loads(path.read_bytes()) == {"a": "\ud83d é"}


def test_a_file_of_answers_has_one_writer(tmp_path, monkeypatch, capsys):
    requests, path = write(tmp_path / "in.jsonl", [line_of(0)]), tmp_path / "out.jsonl"
    words = ["run-batch", str(requests), str(path)]
    inner = []

    def second(*_):
        inner.append(main(words))
        raise RequestError("stopped")

    monkeypatch.setattr("inl.cli.run_batch.make_server", second)
    assert main(words) == 2
    assert inner == [2]
    said = capsys.readouterr().err
    assert "out.jsonl: another run of run-batch writes it" in said
    with only_run(path):  # the lock was released
        assert not path.exists()


def test_embeddings_are_asked_for_without_a_stream(tmp_path):
    body = {"input": "Once"}
    line = {"custom_id": "e", "url": "/v1/embeddings", "body": body}
    seen = []

    async def app(scope, receive, send):
        seen.append((scope["path"], json.loads((await receive())["body"])))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    path = write(tmp_path / "in.jsonl", [line])
    assert run(app, path, tmp_path / "out.jsonl") == (1, 0)
    assert seen == [("/v1/embeddings", body)]
