"""Reasoning and tool calls: derived from templates, parsed in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inl.engine.answers.markup import CallMarkup, Markup, ReasoningMarkup, derive
from inl.engine.answers.markup_parser import MarkupParser
from inl.serve.job import Answer
from inl.text.template import ChatTemplate

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
HERMES = (
    TOOLS + HEAD + "{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
    "}\n</tool_call>{% endfor %}" + TAIL
)
THINKING = (
    TOOLS + HEAD + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}" + TAIL
)
LLAMA = (
    TOOLS + HEAD + "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}" + TAIL
)
MISTRAL = (
    TOOLS + HEAD + "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
    ', "id": "{{ c.id }}"}{% endfor %}]{% else %}{{ m.content }}{% endif %}' + TAIL
)
CASES = {
    "plain": (HEAD + "{{ m.content }}" + TAIL, Markup(CallMarkup())),
    "hermes": (HERMES, Markup(CallMarkup(), None, has_tools=True)),
    "thinking": (THINKING, Markup(None, ReasoningMarkup(), has_tools=True)),
    "llama": (LLAMA, Markup(CallMarkup("", "", "name", "parameters"), has_tools=True)),
    "mistral": (MISTRAL, Markup(CallMarkup("[TOOL_CALLS]", ""), has_tools=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_markup_is_derived_by_rendering(name):
    source, expected = CASES[name]
    template = ChatTemplate(source)
    try:
        assert derive(template.apply, source) == expected
    finally:
        template.close()


TEXTS = st.text(alphabet='ab <>/{}"\\\n[]:,_thinkol', max_size=12)
ARGUMENTS = st.dictionaries(
    TEXTS, st.one_of(TEXTS, st.integers(), st.lists(TEXTS, max_size=2)), max_size=3
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_it"]), ARGUMENTS), max_size=3)


def pieces(draw, text):
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parsed(parser, parts):
    answer = Answer()
    for part in parts:
        answer.add(parser.feed(part))
    answer.add(parser.finish())
    return answer


@given(data=st.data(), calls=CALLS, order=st.booleans())
def test_any_pieces_give_the_calls_the_reasoning_and_the_content(data, calls, order):
    reasoning = data.draw(TEXTS.filter(lambda text: "<" not in text))
    content = data.draw(st.sampled_from(["", "Hello, world.", "a < b"]))
    text = f"<think>\n{reasoning}</think>\n\n{content}" if reasoning else content
    for name, arguments in calls:
        body = {"name": name, "arguments": arguments}
        if order:
            body = dict(reversed(body.items()))
        text += f"<tool_call>\n{json.dumps(body)}\n</tool_call>\n"
    parser = MarkupParser(CallMarkup(), ReasoningMarkup())
    answer = parsed(parser, pieces(data.draw, text))
    assert answer.reasoning == reasoning.lstrip()
    assert answer.content.strip() == content
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == calls
    assert parser.has_calls == bool(calls)
    assert len({call.id for call in answer.calls}) == len(calls)


@given(data=st.data(), text=TEXTS)
def test_text_that_is_no_call_is_content(data, text):
    parser = MarkupParser(CallMarkup(), None)
    answer = parsed(parser, pieces(data.draw, text))
    assert answer.content.strip() == text.strip()
    assert not answer.calls


@given(data=st.data(), calls=CALLS, marks=st.sampled_from(["hermes", "none"]))
def test_what_is_certain_of_a_text_depends_on_no_pieces(data, calls, marks):
    # A stream that goes on behind another connection reads its beginning at once.
    text = data.draw(
        st.sampled_from(["", "Hello", "<think>hm", "<think>\na</think>\nb"])
    )
    for name, arguments in calls:
        body = json.dumps({"name": name, "arguments": arguments})
        text += f"<tool_call>\n{body}\n</tool_call>\n" if marks == "hermes" else body
    text = text[: data.draw(st.integers(0, len(text)))]
    call = CallMarkup() if marks == "hermes" else CallMarkup("", "")
    whole = MarkupParser(call, ReasoningMarkup(), tools=["f", "get_it"])
    parted = MarkupParser(call, ReasoningMarkup(), tools=["f", "get_it"])
    one, many = Answer(), Answer()
    one.add(whole.feed(text))
    for part in pieces(data.draw, text):
        many.add(parted.feed(part))
    assert (many.content, many.reasoning) == (one.content, one.reasoning)
    found = [[(each.name, each.arguments) for each in a.calls] for a in (one, many)]
    assert found[0] == found[1]


def test_arguments_are_passed_on_as_they_arrive():
    parser = MarkupParser(CallMarkup(), None)
    parser.feed('<tool_call>{"name": "f", "arguments": {"a"')
    assert [part.arguments for part in parser.feed(": 1").calls] == [": 1"]


def test_a_forced_call_has_no_marks():
    parser = MarkupParser(CallMarkup(), None, is_forced=True)
    answer = parsed(parser, ['{"name": "f", "argu', 'ments": {"x": "}"}}'])
    assert [(c.name, c.arguments) for c in answer.calls] == [("f", '{"x": "}"}')]


def test_a_bare_object_is_a_call_where_there_are_no_marks():
    parser = MarkupParser(CallMarkup("", "", "name", "parameters"), None)
    answer = parsed(parser, ['{"name": "f", "parameters": {}}'])
    assert [call.name for call in answer.calls] == ["f"]
    parser = MarkupParser(CallMarkup("", "", "name", "parameters"), None)
    assert parsed(parser, ['{"a', '": 1}']).content == '{"a": 1}'


def test_reasoning_that_the_prompt_has_begun():
    parser = MarkupParser(None, ReasoningMarkup(), is_reasoning=True)
    answer = parsed(parser, ["so", " it is</th", "ink>\n\nyes"])
    assert (answer.reasoning, answer.content) == ("so it is", "yes")


SPECIAL = CallMarkup("[TOOL_CALLS]", "<|end|>")


@given(data=st.data(), calls=CALLS, special=st.booleans(), in_list=st.booleans())
def test_marks_may_be_special_tokens(data, calls, special, in_list):
    """Their text, and that of others between and in calls, is not content."""
    parts = [("Hm. ", False), ("<|other|>", True), ("Yes.", False)]
    bodies = [json.dumps({"name": f, "arguments": a}) for f, a in calls]
    if in_list and calls:
        bodies = ["[" + ", ".join(bodies) + "]"]
    for body in bodies:
        cut = data.draw(st.integers(0, len(body)))
        parts += [("[TOOL_CALLS]", special), (body[:cut], False), ("<|x|>", True),
                  (body[cut:], False), ("<|end|>", special)]  # fmt: skip
    text = "".join(part for part, _ in parts)
    spans, at = [], 0
    for part, is_special in parts:
        spans += [(at, at + len(part))] if is_special else []
        at += len(part)
    parser = MarkupParser(SPECIAL, None)
    answer, start = Answer(), 0
    for piece in pieces(data.draw, text):
        stop = start + len(piece)
        inside = [
            (max(a, start) - start, min(b, stop) - start)
            for a, b in spans
            if a < stop and b > start
        ]
        answer.add(parser.feed(piece, inside))
        start = stop
    answer.add(parser.finish())
    assert answer.content == "Hm. Yes."
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == calls


def test_a_special_token_behind_a_call_of_a_list_is_dropped():
    parser = MarkupParser(SPECIAL, None)
    body = '[{"name": "f", "arguments": {}}'
    text = f"[TOOL_CALLS]{body}<|x|>]<|end|>"
    at = text.index("<|x|>")
    answer = Answer()
    answer.add(parser.feed(text, [(0, 12), (at, at + 5), (at + 6, len(text))]))
    answer.add(parser.finish())
    assert (answer.content, len(answer.calls)) == ("", 1)


STRINGS = ["a}b", '"', "{[", "\\", "</tool_call>", "<tool_call>{"]
EXTRA = st.dictionaries(
    st.sampled_from(["id", "type", "x"]),
    st.sampled_from(STRINGS) | st.dictionaries(st.text(max_size=2), st.integers()),
    max_size=2,
)


@given(data=st.data(), before=EXTRA, behind=EXTRA, key=st.sampled_from("ap"))
def test_a_call_is_one_whole_value(data, before, behind, key):
    arguments = data.draw(ARGUMENTS)
    encodings = data.draw(st.integers(0, 2))
    value = arguments
    for _ in range(encodings):
        value = json.dumps(value)
    named = {"a": "arguments", "p": "parameters"}[key]
    body = {**before, "name": "f", named: value, **behind}
    indent = data.draw(st.sampled_from([None, 2]))
    text = f"A<tool_call>\n{json.dumps(body, indent=indent)}\n</tool_call>\n"
    answer = parsed(MarkupParser(CallMarkup(), None), pieces(data.draw, text))
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [
        ("f", arguments)
    ]
    assert answer.content.strip() == "A"


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")], ""),
        ('<tool_call>{"name": "f", "id": "7"}</tool_call>', [("f", "{}")], ""),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")], ""),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")], ""),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>Hm.',
         [("f", '{"x": 1}')], "Hm."),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>Hm.',
         [("f", "{}")], "Hm."),
        ('<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}'
         "</tool_call>", [("f", "{}"), ("g", "{}")], ""),
        ('<tool_call>no call</tool_call><tool_call>{"name": "f"}</tool_call>',
         [("f", "{}")], "<tool_call>no call</tool_call>"),
        ('<tool_call>{"x": 1}</tool_call>', [], '<tool_call>{"x": 1}</tool_call>'),
        ('<tool_call>{"name": "f", "x": 1}</tool_call>', [],
         '<tool_call>{"name": "f", "x": 1}</tool_call>'),
        ('<tool_call>{"name": "f", "argum', [], '<tool_call>{"name": "f", "argum'),
    ],
)  # fmt: skip
def test_calls_in_other_shapes(text, calls, content):
    for parts in ([text], list(text)):
        answer = parsed(MarkupParser(CallMarkup(), None), parts)
        assert [(c.name, c.arguments) for c in answer.calls] == calls
        assert answer.content == content


def test_arguments_are_the_letters_of_the_model():
    body = '{"arguments": {"x": 1e999,  "y": 1.50}, "name": "f"}'
    answer = parsed(MarkupParser(CallMarkup(), None), [f"<tool_call>{body}"])
    assert [c.arguments for c in answer.calls] == ['{"x": 1e999,  "y": 1.50}']


def test_an_object_without_marks_and_arguments_is_a_call_of_a_known_tool_only():
    bare = CallMarkup("", "", "name", "parameters")
    for name, calls in (("f", ["f"]), ("Bob", [])):
        parser = MarkupParser(bare, None, tools=["f"])
        answer = parsed(parser, [f'{{"name": "{name}"}}'])
        assert [call.name for call in answer.calls] == calls


@given(data=st.data())
def test_an_answer_of_one_call_ends_with_it(data):
    one = '<tool_call>{"name": "f", "arguments": {"x": "}"}}</tool_call>'
    parser = MarkupParser(CallMarkup(), None, one_call=True)
    answer = parsed(parser, pieces(data.draw, f"A{one}B{one}"))
    assert [c.arguments for c in answer.calls] == ['{"x": "}"}']
    assert (answer.content, parser.end) == ("A", 1 + one.index("</"))


def test_calls_of_tools_that_are_not_allowed_are_text():
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    parser = MarkupParser(CallMarkup(), None, tools=["f"], only_tools=True)
    answer = parsed(parser, list(text))
    assert (answer.calls, answer.content) == ([], text)


@given(st.lists(st.integers(1, 5), max_size=30), st.booleans())
def test_the_reasoning_ends_at_one_place_however_text_arrives(sizes, is_begun):
    said = "a b</think>\n c"
    text = said if is_begun else f"<think>{said}"
    parser = MarkupParser(None, ReasoningMarkup(), is_reasoning=is_begun)
    at = 0
    for size in [*sizes, len(text)]:
        parser.feed(text[at : at + size])
        at += size
    assert parser.reasoning_end == text.index("\n")


def test_a_forced_call_follows_the_reasoning():
    parser = MarkupParser(
        CallMarkup(), ReasoningMarkup(), is_reasoning=True, is_forced=True
    )
    answer = Answer()
    for letter in 'hm</think>\n{"name": "f", "arguments": {"x": 1}}':
        answer.add(parser.feed(letter))
    answer.add(parser.finish())
    assert (answer.reasoning, answer.content) == ("hm", "")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"x": 1}')]
