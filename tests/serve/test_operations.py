"""What operators rely on: dashboard, log lines, probes, defaults, fair shares."""

from __future__ import annotations

import hmac
import json
import logging
import re
import socket
import threading
from pathlib import Path

import pytest

from http_servers import HashServer
from inl.cli import serve
from inl.cli.main import main
from inl.serve.settings import ServerConfig
from waiting import until

PATH = "/v1/completions"
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
METRIC = re.compile(r"\b(?:vllm|inl):\w+")


def test_each_metric_of_the_dashboard_is_exported(hash_server):
    hash_server.send("POST", PATH, {"prompt": [1, 2], "max_tokens": 4})
    text = hash_server.send("GET", "/metrics")[2].decode()
    exported = {*METRIC.findall(text)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [
        target["expr"] for panel in panels for target in panel.get("targets", ())
    ]
    used = {name for each in expressions for name in METRIC.findall(each)}
    assert len(used) > 8
    # Exported with speculation only.
    assert {n for n in used - exported if ":spec_decode_" not in n} == set()
    names = {"vllm:request_success_total", "vllm:cache_config_info"}
    assert names <= exported


def access_lines(caplog, prefix):
    """Return the lines of requests whose number starts with a prefix.

    Those of a server share theirs: one of another test may still write its last.
    """
    texts = [each.getMessage() for each in [*caplog.records]
             if each.name == "inl.serve.access"]  # fmt: skip
    lines = map(json.loads, texts)
    return [line for line in lines if line["request"].startswith(prefix)]


def test_a_request_is_one_line_of_json_without_its_texts(caplog):
    caplog.set_level(logging.INFO, "inl.serve.access")
    logging.getLogger("inl.serve.access").disabled = False
    body = {"prompt": "a secret text", "max_tokens": 3, "ignore_eos": True}
    with HashServer(api_keys=("private",)) as server:
        key = {"authorization": "Bearer private"}
        sent = server.send("POST", PATH, body, key)
        server.send("POST", PATH, {**body, "stream": True}, key)
        server.send("POST", PATH, body)
        number = sent[1]["x-request-id"]
        until(lambda: len(access_lines(caplog, number[:12])) == 3)
    lines = access_lines(caplog, number[:12])
    first, second, third = lines
    assert first["request"] == number
    assert [each["status"] for each in (first, second, third)] == [200, 200, 401]
    for each in (first, second):
        assert (each["path"], each["completion_tokens"]) == (PATH, 3)
        assert 0 < each["first_token_seconds"] <= each["seconds"]
        assert each["finish_reasons"] == ["length"]
    texts = json.dumps(lines)
    assert "secret" not in texts
    assert "private" not in texts


@pytest.mark.parametrize("stream", [True, False])
def test_the_line_of_an_aborted_request_has_its_error_and_no_reason(caplog, stream):
    caplog.set_level(logging.INFO, "inl.serve.access")
    logging.getLogger("inl.serve.access").disabled = False
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    with HashServer(admin_keys=("operator",)) as server:
        admin = {"authorization": "Bearer operator"}
        with server.connection() as connection:
            with server.paused():
                connection.request("POST", PATH, json.dumps(body))
                server.wait_submitted(1)
                sleeping = server.begin("POST", "/sleep?mode=abort", None, admin)
                until(lambda: server.admission.is_asleep)
                # This answer is later than what the other request does at once.
                assert server.send("GET", "/is_sleeping", None, admin)[0] == 200
            response = connection.getresponse()
            number = response.headers["x-request-id"]
            assert b'"code":"aborted"' in response.read()
        assert sleeping.result()[0] == 200
        until(lambda: access_lines(caplog, number))
    (line,) = access_lines(caplog, number)
    assert (line["status"], line["error"]) == (503, "aborted")
    assert "finish_reasons" not in line


def test_a_draining_server_is_alive_but_not_ready():
    with HashServer() as server:
        assert server.send("GET", "/ready")[0] == 200
        server.server.models.drain()
        assert server.send("GET", "/ready")[0] == 503
        assert server.send("GET", "/health")[0] == 200
        for path in (PATH, "/tokenize", "/v1/messages/count_tokens"):
            status, headers, body = server.send("POST", path, {"prompt": "a"})
            assert status == 503
            assert int(headers["retry-after"]) >= 1
            assert "stopping" in body["error"]["message"]


def test_only_this_machine_connects_and_no_origin_is_allowed_by_default(hash_server):
    assert ServerConfig().host == "127.0.0.1"
    assert ServerConfig().cors_origins == ()
    for method in ("GET", "POST", "OPTIONS"):
        origin = {"origin": "https://app.example"}
        status, headers, _ = hash_server.send(method, PATH, None, origin)
        assert status == 403
        assert not [name for name in headers if "access-control" in name.lower()]


def test_each_key_is_compared_as_a_whole(monkeypatch):
    """The time depends neither on which key is sent nor on how much of it is right."""
    compared, compare = [], hmac.compare_digest

    def counted(a, b):
        compared.append((a, b))
        return compare(a, b)

    keys = ("first", "second", "third")
    with HashServer(api_keys=keys) as server:
        monkeypatch.setattr(hmac, "compare_digest", counted)
        for key in (*keys, "firsx", ""):
            compared.clear()
            server.send("GET", "/load", headers={"authorization": f"Bearer {key}"})
            wanted = [(each.encode(), key.encode()) for each in keys]
            assert compared == wanted


def test_keys_get_fair_shares(monkeypatch):
    """A key with many waiting requests does not make another one wait for them all."""
    keys = ("many", "few")
    with HashServer(max_batch=1, max_queue=40, api_keys=keys) as server:
        order, leave = [], server.admission.leave

        def ask(key):
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": [1, 2], "max_tokens": 8, "ignore_eos": True}
            assert server.send("POST", PATH, body, headers)[0] == 200

        def record(ticket, **options):
            order.append(ticket.client)
            leave(ticket, **options)

        monkeypatch.setattr(server.admission, "leave", record)
        threads = [threading.Thread(target=ask, args=("many",)) for _ in range(20)]
        threads.append(threading.Thread(target=ask, args=("few",)))
        with server.paused():
            for count, thread in enumerate(threads, start=1):
                thread.start()
                server.wait_submitted(count)
        for thread in threads:
            thread.join()
    assert len(order) == 21
    few, many = sorted(set(order), key=order.count)
    assert order[0] == many
    assert order.index(few) <= 5


def test_streams_that_nobody_reads_hold_no_blocks(depth):
    """Their sockets stay open; the others are answered as ever."""
    count = depth(60, 500)
    with HashServer(max_batch=4, max_queue=count) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = (
            b'{"prompt": [1, 2], "max_tokens": 8, "ignore_eos": true, "stream": true}'
        )
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        streams = [socket.create_connection((host, int(port))) for _ in range(count)]
        for stream in streams:
            stream.sendall(request)
        until(lambda: server.engine.stats.rows >= 8 * count)
        server.wait_idle()
        wanted = {"prompt": [3, 4], "max_tokens": 8, "seed": 1}
        assert server.send("POST", PATH, wanted)[0] == 200
        for stream in streams:
            stream.close()
        server.wait_idle()


OPTIONS = {
    "--host 0.0.0.0": ("server", "host", "0.0.0.0"),
    "--port 81": ("server", "port", 81),
    "--api-key a --api-key b": ("server", "api_keys", ("a", "b")),
    "--admin-key c": ("server", "admin_keys", ("c",)),
    "--max-adapters 2": ("engine", "max_adapters", 2),
    "--max-adapters 2 --max-adapter-rank 9": ("engine", "max_adapter_rank", 9),
    "--max-queue 3": ("server", "max_queue", 3),
    "--max-queued-tokens 5": ("server", "max_queued_tokens", 5),
    "--max-per-key 2": ("server", "max_per_key", 2),
    "--max-body 99": ("server", "max_body_bytes", 99),
    "--max-header 2000": ("server", "max_header_bytes", 2000),
    "--max-connections 9": ("server", "max_connections", 9),
    "--receive-seconds 2": ("server", "receive_seconds", 2.0),
    "--send-seconds 3": ("server", "send_seconds", 3.0),
    "--idle-seconds 4": ("server", "idle_seconds", 4.0),
    "--cors-origin https://a": ("server", "cors_origins", ("https://a",)),
    "--allowed-host a": ("server", "allowed_hosts", ("a",)),
    "--allow-image-hosts a --allow-image-hosts b:8": (
        "server", "image_hosts", ("a", "b:8"),
    ),
    "--tls-cert c --tls-key k": ("server", "private_key", "k"),
    "--tls-cert c": ("server", "certificate", "c"),
    "--drain-seconds 7": ("server", "drain_seconds", 7.0),
    "--files f": ("server", "files", "f"),
    "--max-file-bytes 9": ("server", "max_file_bytes", 9),
    "--max-file-bytes-per-key 9": ("server", "max_file_bytes_per_key", 9),
    "--stored-responses 0": ("server", "stored_responses", 0),
    "--stored-response-bytes 9": ("server", "stored_response_bytes", 9),
    "--stored-response-seconds 9": ("server", "stored_response_seconds", 9.0),
    "--idle-unload 8": ("server", "idle_unload", 8.0),
    "--no-vllm-metrics": ("server", "vllm_metrics", False),
    "--device cpu:0": ("engine", "backend", "cpu:0"),
    "--dtype float32": ("engine", "dtype", "float32"),
    "--kv-dtype int8": ("engine", "kv_dtype", "int8"),
    "--quantize fp8": ("engine", "quantize", "fp8"),
    "--placement tensor=2": ("engine", "placement", "tensor=2"),
    "--tensor-parallel 2": ("engine", "tensor_parallel", 2),
    "--allow-hosted": ("engine", "allow_hosted", True),
    "--invariant": ("engine", "invariant", True),
    "--mesh tensor=2": ("engine", "mesh", "tensor=2"),
    "--max-batch 5": ("engine", "max_batch", 5),
    "--context 77": ("engine", "context", 77),
    "--trace t": ("engine", "trace", "t"),
    "--speculation ngram": ("engine", "speculation", "ngram"),
    "--speculation model --draft-model m": ("engine", "draft_model", "m"),
    "--speculation model --draft-model m --draft-device cpu:0": (
        "engine", "draft_backend", "cpu:0"),
    "--speculation ngram --max-drafts 3": ("engine", "max_drafts", 3),
    "--no-adaptive-drafts": ("engine", "adaptive_drafts", False),
    "--model a=b": ("models", None, [("a", "b")]),
    "some.gguf --name x": ("models", None, [("x", "some.gguf")]),
}  # fmt: skip


@pytest.mark.parametrize("words", [(), ("--tls-key", "k.pem")])
@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_certificate_is_read_before_a_model(capsys, tmp_path, words, text):
    file = tmp_path / "c.pem"
    if text:
        file.write_text(text)
    found = ["--tls-cert", str(file), *words]
    assert main(["serve", "absent.gguf", "--port", "0", *found]) == 2
    error = capsys.readouterr().err
    assert f"inl: RequestError: TLS certificate {file}" in error
    assert "accepts files in the form PEM" in error


def test_a_model_that_does_not_exist_is_refused_before_it_is_asked_for(capsys):
    models = ["--model", "a=absent.gguf", "--model", "b=org/name"]
    assert main(["serve", "--port", "0", *models]) == 2
    assert "model: found 'absent.gguf', which does not exist" in capsys.readouterr().err


def test_a_port_in_use_is_found_before_a_model(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "absent.gguf", "--port", port]) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def configured(monkeypatch, words):
    """Return what ``inl serve`` would serve."""
    found = {}

    def record(models, config, engine, tracing, port):
        found.update(models=models, server=config, engine=engine)

    monkeypatch.setattr(serve, "_serve", record)
    assert main(["serve", *words]) == 0
    return found


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_has_its_effect(monkeypatch, option):
    part, field, value = OPTIONS[option]
    default = configured(monkeypatch, [])[part]
    found = configured(monkeypatch, option.split())[part]
    if field is not None:
        default, found = getattr(default, field), getattr(found, field)
    assert found == value != default
