"""The ``structured`` option: accepted forms, and what is refused."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import resolve_model
from inl.errors import MissingPackage, RequestError
from inl.executor.model_loader import open_model
from inl.guidance.structured import read_structured
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner


@pytest.fixture(scope="module")
def engine():
    model = open_model(resolve_model(None))
    limits = Limits(
        slots=9, blocks=(200,), block_size=16, max_blocks_per_seq=32,
        vocab=model.config.vocab_size, depth=2,
    )  # fmt: skip
    with InferenceEngine(
        model, config=EngineConfig(max_batch=8), runner=HashRunner(limits)
    ) as made:
        yield made


def generate(engine, **options):
    pytest.importorskip("llguidance")
    return engine.generate([1, 2, 3], **{"max_tokens": 100, "seed": 1} | options)


CHOICES = ['a "quoted" \\ one', "naïve 日本", "two\nlines", "red", "reddish"]


@pytest.mark.parametrize(
    ("structured", "matches"),
    [
        ({"regex": "[a-c]{2,4}-[0-9]+"}, re.compile("[a-c]{2,4}-[0-9]+").fullmatch),
        ({"choice": CHOICES}, CHOICES.__contains__),
        ({"choice": ["only"]}, ["only"].__contains__),
        ({"lark": 'start: "a" b+\nb: "b" | "c"'}, re.compile("a[bc]+").fullmatch),
        ({"json_schema": {"type": "integer", "minimum": 7, "maximum": 99}},
         lambda text: 7 <= int(text) <= 99),
        ({"json_schema": '{"const": [1, {"a": null}]}'},
         lambda text: json.loads(text) == [1, {"a": None}]),
    ],
)  # fmt: skip
def test_outputs_match(engine, structured, matches):
    for seed in range(4):
        done = generate(engine, structured=structured, temperature=1.0, seed=seed)
        assert matches(done.text), done
        assert done.finish_reason == "stop"


def test_forced_tokens_are_not_sampled(engine):
    schema = {"const": {"the first name": "Alexandria", "the last name": "Smith"}}
    before = engine.stats
    plain = generate(engine, structured={"json_schema": schema})
    skipped = engine.stats
    scored = generate(engine, structured={"json_schema": schema}, logprobs=0)
    assert json.loads(plain.text) == schema["const"]
    assert plain.token_ids == scored.token_ids
    assert len(plain.logprobs or ()) < len(scored.logprobs) == len(plain.token_ids) > 9
    assert skipped.steps - before.steps <= 4
    assert engine.stats.steps - skipped.steps >= len(plain.token_ids)


def test_max_tokens_that_just_suffice_report_the_end_of_the_grammar(engine):
    done = generate(engine, structured={"choice": ["only"]})
    exact = generate(
        engine, structured={"choice": ["only"]}, max_tokens=len(done.token_ids)
    )
    assert (exact.text, exact.finish_reason) == ("only", "stop")


def test_an_allowed_token_that_the_grammar_excludes_ends_the_request(engine):
    with pytest.raises(RequestError, match="excludes every token that the grammar"):
        generate(engine, structured={"regex": "[0-9]+"}, allowed_token_ids=[5000])
    assert generate(engine, structured={"choice": ["on"]}).text == "on"


BAD = {
    "no dict": ("text", "found 'text', accepts a dict with one of json_schema, regex"),
    "two fields": ({"regex": "a", "lark": "b"}, "accepts a dict with one of"),
    "unknown field": ({"grammar": "a"}, "found 'grammar', accepts json_schema, regex"),
    "schema of a number": (
        {"json_schema": 5},
        "json_schema: found 5, accepts a schema",
    ),
    "schema with a set": ({"json_schema": {"enum": {1}}}, "that JSON can express"),
    "schema with NaN": ({"json_schema": {"const": float("nan")}}, "JSON can express"),
    "schema without JSON": ({"json_schema": "{"}, "structured.json_schema: "),
    "unknown type": ({"json_schema": {"type": "objec"}}, "Invalid type: objec"),
    "unsupported": ({"json_schema": {"not": {}}}, 'Unimplemented keys: ["not"]'),
    "unsatisfiable": (
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 1}},
        "minimum (5) is greater than maximum (1)",
    ),
    "missing reference": ({"json_schema": {"$ref": "#/$defs/x"}}, "does not exist"),
    "other address": ({"json_schema": {"$ref": "http://x.y/z"}}, "http://x.y/z"),
    "deep": ({"json_schema": '{"items":' * 5_000 + "{}" + "}" * 5_000}, "5001 levels"),
    "empty regex": ({"regex": ""}, "regex: found '', accepts a non-empty string"),
    "unclosed": ({"regex": "("}, "unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "deep regex": ({"regex": "(" * 5_000 + "a" + ")" * 5_000}, "structured.regex"),
    "huge automaton": ({"regex": "(a{1000}){1000}"}, "structured.regex"),
    "no start": ({"lark": 'begin: "a"'}, "structured.lark"),
    "no choices": ({"choice": []}, "choice: found [], accepts a list of non-empty"),
    "empty choice": ({"choice": ["a", ""]}, "accepts a list of non-empty strings"),
    "choice of text": ({"choice": "abc"}, "choice: found 'abc', accepts a list"),
    "surrogate": ({"regex": "\ud800"}, "accepts text that UTF-8 can encode"),
    "10 MB of schema": (
        {"json_schema": {"type": "object", "description": "x" * 10_000_000}},
        "found 10000037 bytes, accepts 1048576 (EngineConfig.max_grammar_bytes)",
    ),
    "10 MB of JSON": ({"json_schema": "[" * 10_000_000}, "found 10000000 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_the_value_and_what_is_accepted(engine, name):
    structured, sentence = BAD[name]
    started = time.process_time()
    with pytest.raises(RequestError, match=re.escape(sentence)) as caught:
        generate(engine, structured=structured)
    assert str(caught.value).startswith("structured")
    assert len(str(caught.value)) < 600
    assert time.process_time() - started < 20
    # Nothing is lost: the engine serves the next request.
    assert generate(engine, max_tokens=2).finish_reason == "length"


def test_the_end_is_the_grammars(engine):
    with pytest.raises(RequestError, match="ignore_eos: found True with structured"):
        generate(engine, structured={"regex": "a+"}, ignore_eos=True)


def test_the_missing_package_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackage, match=r"pip install .*core\[guidance\]"):
        engine.generate([1], structured={"regex": "never compiled before"})


def test_the_text_of_a_grammar_is_read_without_the_package():
    assert read_structured({"choice": ["a", "b", "a"]}, 99).text == (
        'start: TEXT\nTEXT: "a" | "b"'
    )
