"""What the official clients do by themselves: retries, streams of calls, TLS."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request

import anthropic
import openai
import pytest

from depth import mostly_long
from http_servers import HashServer
from inl.serve.admission import Admission
from waiting import until

ANY = mostly_long([0, 2])
"""Numbers of front-ends."""

SECONDS = 2
"""Longer than what the clients wait without ``Retry-After``: 0.5 s."""

MESSAGES = [{"role": "user", "content": "a"}]


def ask_openai(url, retries):
    options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": retries}
    with openai.OpenAI(**options) as client:
        return client.chat.completions.create(
            model="hash", messages=MESSAGES, max_tokens=2
        )


def ask_anthropic(url, retries):
    options = {"base_url": url, "api_key": "none", "max_retries": retries}
    with anthropic.Anthropic(**options) as client:
        return client.messages.create(model="hash", messages=MESSAGES, max_tokens=2)


ASKS = {"openai": ask_openai, "anthropic": ask_anthropic}


@pytest.mark.parametrize("frontends", ANY)
@pytest.mark.parametrize("name", ASKS)
def test_a_refused_client_comes_back_after_the_time_it_was_told(
    name, frontends, monkeypatch
):
    monkeypatch.setattr(Admission, "retry_seconds", SECONDS)
    results, waits, may_ask, sleep = [], [], threading.Event(), time.sleep

    def wait(seconds):
        if threading.current_thread() is not asked:
            sleep(seconds)
            return
        waits.append(seconds)
        assert may_ask.wait(300)

    options = {"max_batch": 1, "max_queue": 0, "frontends": frontends}
    with HashServer(**options) as server:
        with server.busy():
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as no:
                ASKS[name](server.url, 0)
            assert no.value.status_code == 503
            assert no.value.response.headers["retry-after"] == str(SECONDS)
            asked = threading.Thread(
                target=lambda: results.append(ASKS[name](server.url, 3))
            )
            monkeypatch.setattr(time, "sleep", wait)
            asked.start()
            until(lambda: waits)
        may_ask.set()
        asked.join()
        assert waits == [SECONDS]
        assert server.admission.rejected == 2, "the first retry was accepted"
    assert results[0].usage


def test_each_token_is_sent_before_the_next_step(any_hash_server):
    url = f"{any_hash_server.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="none", timeout=300) as client,
        any_hash_server.paused() as gate,
    ):
        stream = client.completions.create(
            model="hash", prompt=[1, 2], max_tokens=9, stream=True, seed=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        for _ in range(9):
            gate.hold_after(1)
            (choice,) = next(stream).choices
            assert len(choice.token_ids) == 1
        assert choice.finish_reason == "length"
        assert list(stream) == []


def call_parts(stream):
    """Yield the parts of a streamed call of the function ``look``."""
    for chunk in stream:
        (choice,) = chunk.choices
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            yield call
    assert choice.finish_reason == "tool_calls"


def test_arguments_of_a_call_are_streamed(any_hash_server):
    """Some are read while the steps of the others are held."""
    # Free text: what a grammar forces is one piece.
    city = {"type": "string", "pattern": "^[a-z ]{80,84}$"}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    url = f"{any_hash_server.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="none") as client,
        any_hash_server.paused() as gate,
    ):
        gate.hold_after(3)
        calls = call_parts(client.chat.completions.create(
            model="hash", messages=MESSAGES, tools=[tool], tool_choice="required",
            temperature=0, max_tokens=200, stream=True,
        ))  # fmt: skip
        first = next(calls)
        assert first.id
        assert first.function.name == "look"
        text = first.function.arguments or ""
        while len(text) <= len('{"city": "'):
            text += next(calls).function.arguments
        assert len(text) < 80
        gate.release()
        text += "".join(call.function.arguments for call in calls)
    assert json.loads(text).keys() == {"city"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("frontends", ANY)
def test_tls_files_encrypt_connections(frontends, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    files = {"certificate": str(certificate), "private_key": str(key)}
    with HashServer(frontends=frontends, **files) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=certificate)
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none",
            http_client=openai.DefaultHttpxClient(verify=trusted),
        )  # fmt: skip
        with client:
            parts = client.completions.create(
                model="hash", prompt=[1], max_tokens=3, stream=True
            )
            assert "".join(part.choices[0].text for part in parts)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{server.url}/health", timeout=300)
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(server.url.replace("https", "http"), timeout=300)
