"""SIGKILL of a worker and SIGTERM of the server while requests run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from held_runner import StepGate
from http_servers import READY, HashServer
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.runners.worker_runner import WorkerRunner
from waiting import until

PROMPT = "Count: one, two,"
TOKENS = 48


class WorkerServer(HashServer):
    """A server whose model runs in a worker process."""

    def _open(self, on_step):
        config = EngineConfig(
            backend=f"worker:{sys.executable}/cpu",
            max_batch=2,
            context=512,
            on_worker_loss="restart",
        )
        self.engine = InferenceEngine.from_pretrained(None, config, on_step=on_step)
        return self.engine


@pytest.mark.full
def test_streams_continue_after_the_worker_was_killed(monkeypatch):
    gate, collect = StepGate(), WorkerRunner.collect

    def collect_later(runner):
        gate.pass_step()
        return collect(runner)

    monkeypatch.setattr(WorkerRunner, "collect", collect_later)
    with WorkerServer() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        options = {"model": "hash", "prompt": PROMPT, "temperature": 0}
        options |= {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
        wanted = client.completions.create(**options).choices[0].text
        gate.hold_after(5)
        stream = client.completions.create(stream=True, **options)
        parts = [next(stream).choices[0].text]
        assert gate.is_held.wait(300)
        os.kill(server.engine.runner.pid, signal.SIGKILL)
        gate.release()
        parts += [chunk.choices[0].text for chunk in stream]
        assert "".join(parts) == wanted
        assert server.engine.core.restarts == 1
        server.wait_idle()


@pytest.mark.full
def test_sigterm_under_load_loses_no_accepted_answer(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-m", "inl", "serve", "--port", "0", "--device", "cpu"]
    command += ["--drain-seconds", "300"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--max-batch", "2"], stderr=output)
    try:
        while not (found := READY.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        client = openai.OpenAI(
            base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=300
        )
        answers = []

        def ask(seed):
            try:
                done = client.completions.create(
                    model="smollm2-135m-instruct", prompt=PROMPT, seed=seed,
                    max_tokens=TOKENS, extra_body={"ignore_eos": True},
                )  # fmt: skip
                return done.usage.completion_tokens
            except openai.APIStatusError as error:
                return error.status_code
            except openai.APIConnectionError:
                return 0

        def keep_asking(seed):
            answer = TOKENS
            while answer == TOKENS:
                answer = ask(seed)
                answers.append(answer)

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(keep_asking, seed) for seed in range(8)]
            load = client.with_options(base_url=found[1])
            until(lambda: load.get("/load", cast_to=object)["server_load"] >= 6)
            process.send_signal(signal.SIGTERM)
            for each in asked:
                each.result()
        assert process.wait(300) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert {*answers} <= {TOKENS, 503, 0}
    lines = [line.partition(": ")[2] for line in log.read_text().splitlines()]
    records = [json.loads(line) for line in lines if line.startswith("{")]
    accepted = [each for each in records if each["path"] == "/v1/completions"]
    finished = [each for each in accepted if each["status"] == 200]
    assert len(finished) >= 6
    assert answers.count(TOKENS) == len(finished)
    assert all(each["status"] in (200, 503) for each in accepted)
