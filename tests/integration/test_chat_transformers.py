"""Chat templates render as in transformers, for each argument of ``chat_ids``.

transformers is given the contents in the form that the template shows, a text or parts.
"""

from __future__ import annotations

from itertools import product

import pytest

from inl.engine.chat import chat_ids
from inl.errors import InlError
from inl.text.template import ChatTemplate

utils = pytest.importorskip("transformers.utils.chat_template_utils")

CHAT = (
    "{{ tools | tojson(indent=2) if tools }}{% for d in documents or [] %}{{ d.text }}"
    "{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.thinking }}|CONTENT|"
    "{{ m.tool_calls | tojson if m.tool_calls }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ 'no' if not enable_thinking }}"
    "{% endif %}{{ strftime_now('%Y') }}"
)
CONTENTS = {
    "as it is": "{{ m.content }}",
    "trimmed": "{{ m.content | trim }}",
    "indented": "{{ (m.content or '') | indent(2) }}",
    "compact": "{{ m.content | tojson(true, none, (',', ':'), true) }}",
    "of parts": "{% for p in m.content %}{{ p.text }}{% endfor %}",
    "last part": "{{ m.content.split('</think>')[-1] }}",
}
MESSAGES = {
    "asked": [{"role": "user", "content": "a\nb "}],
    "begun": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y  "},
    ],
    "reasoned": [{"role": "assistant", "content": "z", "reasoning": "why "}],
    "thought": [{"role": "assistant", "content": "q</think> é", "thinking": "w"}],
    "called": [
        {"role": "assistant", "content": None, "tool_calls": [{"b": 1, "a": [None]}]},
        {"role": "user", "content": "ok"},
    ],
    "in parts": [{"role": "user", "content": [{"text": "one"}, {"text": "two "}]}],
}
ARGUMENTS = [
    {},
    {"add_generation_prompt": False},
    {"tools": [{"name": "f", "parameters": {"é": [1, {}]}}], "enable_thinking": True},
    {"documents": [{"title": "t", "text": "d"}]},
    {"continue_final_message": True},
    {"continue_final_message": "reasoning"},
]


class Model:
    name = "m"


class Text:
    """A tokenizer of one id per character, without control tokens."""

    control_tokens: tuple[str, ...] = ()
    longest_token = 1

    def encode(self, text, add_special=True):
        return [ord(one) for one in text]


def expected(source, messages, add_generation_prompt=None, **arguments):
    continued = arguments.get("continue_final_message", False)
    if add_generation_prompt is None:
        add_generation_prompt = not continued
    texts, _ = utils.render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=add_generation_prompt,
        **arguments,
    )  # fmt: skip
    return texts[0]


def in_form(message, *, of_parts):
    content = message["content"]
    if of_parts and isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else content
    elif not of_parts and isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}


@pytest.mark.parametrize("content", CONTENTS)
def test_rendered_as_in_transformers(content, monkeypatch):
    monkeypatch.setattr("inl.engine.chat.check_length", lambda *_: None)
    source = CHAT.replace("CONTENT", CONTENTS[content])
    template = ChatTemplate(source)
    both = 0
    for messages, arguments in product(MESSAGES.values(), ARGUMENTS):
        forms = [in_form(each, of_parts=content == "of parts") for each in messages]
        try:
            text = expected(source, forms, **arguments)
        except Exception:
            text = None
        try:
            ids = chat_ids(Model, template, Text(), messages, context=9999, **arguments)
        except InlError:
            assert text is None, (messages, arguments)
            continue
        assert "".join(map(chr, ids)) == text, (messages, arguments)
        both += 1
    template.close()
    assert both > 5
