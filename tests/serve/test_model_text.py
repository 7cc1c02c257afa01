"""The text side of a model: what is known of a prompt once it is encoded."""

from __future__ import annotations

from types import SimpleNamespace

from inl.serve.job import Conversation, Job
from inl.serve.markup import Markup, ReasoningMarkup
from inl.serve.markup_parser import MarkupParser
from inl.serve.model_text import MAX_BEGINNINGS, ModelText

BEGUN = "a<think>\n"


class Variable:
    """Counts how often it is written."""

    writings = 0

    def __repr__(self):
        Variable.writings += 1
        return "v" * 100_000


def reasoning_text():
    """Return the texts of a model whose template begins the reasoning."""
    source = SimpleNamespace(
        chat_template=SimpleNamespace(
            apply=lambda *_, **__: BEGUN, shapes=SimpleNamespace(fit=list)
        ),
        tokenizer=SimpleNamespace(decode=lambda *_, **__: BEGUN),
        chat_ids=lambda *_, **__: [1, 2],
    )
    text = ModelText(source)
    text.markup = Markup(None, ReasoningMarkup(), has_tools=True)
    return text


def test_variables_are_read_once_for_all_completions():
    text = reasoning_text()
    prompt = Conversation(
        [{"role": "user", "content": "a"}], variables={"x": Variable()}
    )
    Variable.writings = 0
    [encoded] = text.encode_all([prompt])
    assert Variable.writings == 1
    for _ in range(128):
        parser = text.parser(encoded)
        assert isinstance(parser, MarkupParser)
        assert parser.feed("b</think>c").reasoning == "b"
    job = Job("m", [prompt], {}, structure={"regex": "a"})
    assert text.structure_of(job, encoded) == {"regex": "a", "after": "</think>"}
    assert Variable.writings == 1


def test_large_variables_are_not_kept():
    text = reasoning_text()
    for number in range(2 * MAX_BEGINNINGS):
        variables = {"x": f"{number}" + "v" * 10_000}
        text.encode_all([Conversation([{"role": "user"}], variables=variables)])
    kept = text._beginnings
    assert len(kept) <= MAX_BEGINNINGS
    assert all(len(key) <= 64 for key in kept)
