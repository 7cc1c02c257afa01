"""Request fields beyond those of OpenAI's API, against the engine's own options."""

from __future__ import annotations

import json
import time

import pytest

from http_servers import HashServer, hash_engine
from inl.engine.answers.conversation import PromptScores
from inl.guidance.grammars import Grammars
from inl.scheduling.sampling_params import TokenLogprob
from inl.serve.job import Answer, Usage
from inl.serve.openai.completions import CompletionExchange
from inl.serve.structured import structure_of

PATH = "/v1/completions"
PROMPT = list(range(100, 500))


@pytest.fixture(scope="module")
def twin():
    with hash_engine(4) as engine:
        yield engine


def complete(server, status=200, path=PATH, **body):
    found, _, answer = server.send("POST", path, {"max_tokens": 4, **body})
    assert found == status, answer
    return answer


def test_completions_of_one_prompt_share_its_blocks(hash_server):
    before = hash_server.engine.stats.tokens
    answer = complete(hash_server, prompt=PROMPT, n=4, seed=1)
    assert len(answer["choices"]) == 4
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert hash_server.engine.stats.tokens - before < 1.2 * len(PROMPT)
    hash_server.wait_idle()


def test_prompt_logprobs_are_the_engines(hash_server, twin):
    prompt = [5, 6, 7, 8]
    done = twin.generate(prompt, prompt_logprobs=2, max_tokens=4, temperature=1, seed=1)
    answer = complete(hash_server, prompt=prompt, prompt_logprobs=2, n=2, seed=1)
    for choice in answer["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for found, wanted in zip(others, done.prompt_logprobs[1:], strict=True):
            assert found[str(wanted.token)]["logprob"] == pytest.approx(wanted.logprob)
            for rank, (token, value) in enumerate(wanted.top, 1):
                assert found[str(token)]["logprob"] == pytest.approx(value)
                assert found[str(token)]["rank"] == rank
    messages = [{"role": "user", "content": "a"}]
    chat = {"messages": messages, "prompt_logprobs": 0}
    answer = complete(hash_server, path="/v1/chat/completions", **chat)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    ends = {"prompt": prompt, "prompt_logprobs": 2, "seed": 1}
    (end,) = complete(hash_server, prompt_logprobs_start=2, **ends)["choices"]
    assert end["prompt_logprobs"] == [None, None, *choice["prompt_logprobs"][2:]]
    answer = complete(hash_server, 400, prompt_logprobs_start=4, **ends)
    assert answer["error"]["param"] == "prompt_logprobs_start"
    answer = complete(hash_server, 400, prompt=prompt, prompt_logprobs=0, stream=True)
    assert answer["error"]["param"] == "prompt_logprobs"


def test_an_echoed_prompt_has_logprobs(hash_server, twin):
    prompt = twin.tokenizer.encode("One two three")
    options = {"temperature": 1, "seed": 1, "max_tokens": 4}
    done = twin.generate(prompt, prompt_logprobs=1, logprobs=1, **options)
    answer = complete(hash_server, prompt=prompt, echo=True, logprobs=1, seed=1)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith("One two three")
    assert "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    wanted = [*done.prompt_logprobs[1:], *done.logprobs]
    assert found["token_logprobs"][1:] == pytest.approx([w.logprob for w in wanted])
    offsets = found["text_offset"]
    assert offsets[:2] == [0, len(found["tokens"][0])]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "seed": 1}
    (end,) = complete(hash_server, prompt_logprobs_start=2, **body)["choices"]
    for name, values in end["logprobs"].items():
        skipped = [None, None] if "logprobs" in name else found[name][:2]
        assert values == skipped + found[name][2:]


def test_an_echoed_prompt_that_ended_early_lacks_logprobs():
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0}
    exchange = CompletionExchange(json.dumps(body).encode(), "1", "model")
    scores = PromptScores([5, 6, 7], [None, TokenLogprob(6, -1.0)])
    answer = Answer(finish_reason="length", prompt=scores)
    (choice,) = exchange.body([answer], Usage(3))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, None]


def test_a_timeout_ends_the_answer():
    """The engine's clock, not the machine's, passes it after five steps."""
    options = {"max_tokens": 900, "ignore_eos": True, "return_token_ids": True}
    with HashServer(max_batch=1) as server:
        with server.paused() as gate:
            body = {"prompt": [1], "timeout_seconds": 3600, **options}
            answer = server.begin("POST", PATH, body)
            gate.hold_after(5)
            assert gate.is_held.wait(300)
            deadlines = server.engine.core.scheduler._deadlines
            deadlines.clock = lambda: time.time() + 7200
        (choice,) = answer.result(300)[2]["choices"]
        assert choice["finish_reason"] == "length"
        assert 0 < len(choice["token_ids"]) < 900


def test_priorities_are_those_of_vllm():
    body = b'{"prompt": "a", "priority": -7}'
    assert CompletionExchange(body, "1", "m").job.options["priority"] == 7


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}},
          "required": ["a"], "additionalProperties": False}  # fmt: skip
PART = {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}
TAG = {"type": "structural_tag", "structures": [PART], "triggers": ["<f="]}


def follows(engine, structure, text):
    """Whether a structure allows a text as a beginning."""
    vocab = engine.runner.limits.vocab
    guide = Grammars(lambda: engine.tokenizer, vocab, [0], 1 << 20).guide(structure)
    for token in engine.tokenizer.encode(text, False):
        if not guide.masks()[0][token // 32] >> token % 32 & 1:
            return False
        guide.advance(token)
    return True


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("any text", True),
        ('Hm. <f=x>{"a": true}</f> Then', True),
        ("Hm. <f=y>", False),
        ('Hm. <f=x>{"a": 1}</f>', False),
        ('Hm. <f=x>{"a": true}.', False),
    ],
)
def test_structural_tags_constrain_their_parts(twin, text, is_allowed):
    assert follows(twin, structure_of(TAG), text) == is_allowed
    fields = {name: TAG[name] for name in ("structures", "triggers")}
    same = structure_of(None, {"structural_tag": fields})
    assert same == structure_of(TAG)


def test_structural_tags_are_accepted_and_checked(hash_server):
    complete(hash_server, prompt="a", response_format=TAG)
    tag = {**TAG, "triggers": ["<g"]}
    answer = complete(hash_server, 400, prompt="a", response_format=tag)
    assert answer["error"]["param"] == "response_format"


def test_reported_hits_are_the_tokens_that_were_skipped(hash_server):
    head = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"
    text = "You answer in one short sentence. " * 20
    for turn in range(3):
        before = hash_server.engine.stats
        body = {"system": head.format(turn) + text, "max_tokens": 1,
                "messages": [{"role": "user", "content": f"turn {turn}"}]}  # fmt: skip
        usage = complete(hash_server, path="/v1/messages", **body)["usage"]
        after = hash_server.engine.stats
        assert after.tokens - before.tokens == usage["input_tokens"]
        hits = after.prefix_hit_tokens - before.prefix_hit_tokens
        assert hits == usage["cache_read_input_tokens"]
        assert turn == 0 or hits >= 96
