"""Many streams while engines are killed, stopped and cut off, again and again."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random

from depth import SEED, scaled
from fleets import EngineProcess, Fleet, Proxy
from http_servers import HashServer
from waiting import until

TEXT = "/v1/completions"
ENGINES = 3
SLOW = {"max_batch": 16, "seconds": 0.01}


def body_of(number):
    draw = Random(number)
    prompt = [*range(64), *(draw.randrange(1000) for _ in range(draw.randrange(1, 90)))]
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "seed": number}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    kinds = (
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9},
        {"presence_penalty": 0.4, "logprobs": 1},
        {"n": 2},
        {"min_tokens": 50, "ignore_eos": False},
    )
    return body | kinds[number % len(kinds)]


def output_of(lines):
    """Return tokens and scores of each choice, their ends, and the usage."""
    tokens, scores, ends, usage = {}, {}, {}, None
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in ends, "nothing follows an end"
            tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice.get("logprobs"):
                new = choice["logprobs"]["token_logprobs"]
                scores.setdefault(index, []).extend(new)
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return tokens, scores, ends, counts


class Host:
    """An engine behind a network, which is started again if it ends."""

    def __init__(self, stack):
        self._stack = stack
        self.process = stack.enter_context(EngineProcess(**SLOW))
        self.address = self.process.address
        self.proxy = stack.enter_context(Proxy(self.address))

    def kill(self, wait):
        self.process.kill()
        wait()
        options = {"address": self.address, **SLOW}
        self.process = self._stack.enter_context(EngineProcess(**options))
        assert self.process.address == self.address

    def stop(self, wait):
        self.process.stop()
        wait()
        self.process.go_on()

    def cut_off(self, wait):
        self.proxy.partition()
        wait()
        self.proxy.heal()

    def restart(self, wait):
        self.process.terminate()
        assert self.process.process.wait(300) == 0
        self.kill(wait)


def test_every_stream_is_the_undisturbed_one_whatever_happens_to_engines():
    streams, clients, rounds = scaled((16, 6, 4), (32, 8, 8), (1000, 24, 300))
    draw, done = Random(SEED), threading.Semaphore(0)
    with HashServer(max_batch=8) as plain:
        bodies = [body_of(number) for number in range(streams)]
        wanted = [
            output_of(
                plain.send("POST", TEXT, {**body, "stream": True})[2]
                .decode()
                .splitlines()
            )
            for body in bodies
        ]
    with ExitStack() as stack:
        hosts = [Host(stack) for _ in range(ENGINES)]
        fleet = stack.enter_context(Fleet([each.proxy.address for each in hosts]))
        states = lambda: [each.state.value for each in fleet.client.engines]  # noqa: E731
        until(lambda: states() == ["ready"] * ENGINES)
        ended, found = threading.Event(), {}

        def ask(number):
            found[number] = output_of(fleet.stream(TEXT, bodies[number % streams]))
            assert found[number] == wanted[number % streams], number
            done.release()

        def ask_all(first):
            # Until everything has happened, and each stream at least once.
            for number in itertools.count(first, clients):
                if ended.is_set() and number >= streams:
                    return
                ask(number)

        with ThreadPoolExecutor(clients) as pool:
            asked = [pool.submit(ask_all, first) for first in range(clients)]
            try:
                for _ in range(rounds):
                    host = draw.choice(hosts)
                    at = hosts.index(host)
                    act = draw.choice(
                        [host.kill, host.stop, host.cut_off, host.restart]
                    )
                    act(lambda at=at: until(lambda: states()[at] != "ready"))
                    until(lambda at=at: states()[at] == "ready")
                    assert done.acquire(timeout=300), "no stream ends"
            finally:
                ended.set()
            for each in asked:
                each.result()
        assert fleet.counts["continued"], "something was disturbed"
        assert not fleet.counts["diverged"]
        assert not fleet.counts["failed"]
        # The last answers have been sent before their places are free.
        until(lambda: not fleet.client.admission.open)
        until(lambda: not fleet.client.calls.groups)
        seconds = sorted(fleet.client.continue_seconds)
        print(
            f"{len(found)} streams, {fleet.counts['continued']} continued; noticing "
            f"to the next token p50 {seconds[len(seconds) // 2]:.3f} s, "
            f"most {seconds[-1]:.3f} s"
        )
