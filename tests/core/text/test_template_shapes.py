"""Messages in the form that a template takes: none of their texts is lost."""

from __future__ import annotations

import json

import pytest

from inl.errors import RequestError, TemplateError
from inl.text.template import ChatTemplate

ANY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def calls(arguments, check=""):
    return (
        "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}" + check + "{{ c.function.name }}("
        "{{ c.function.arguments" + arguments + " }}){% endfor %}{% endfor %}"
    )


NINE = "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}<{{ c.id }}>"
IPYTHON = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('role') }}{% endif %}{% endfor %}"
) + calls(" | tojson")
NULL_ONLY = (
    "{% for m in messages %}{% if m.tool_calls and m.content is not none %}"
    "{{ raise_exception('content of calls is null') }}{% endif %}{% endfor %}"
) + calls(" | tojson")


@pytest.fixture
def fit():
    """Return the rendering of fitted messages by a template."""
    opened = []

    def fitted(source, messages):
        template = ChatTemplate(source)
        opened.append(template)
        return template.apply(template.shapes.fit(messages))

    yield fitted
    for template in opened:
        template.close()


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


TEXT = [{"type": "text", "text": "Red"}]
FORMS = [
    (ANY, said(("user", "Red")), "[user]Red"),
    (ANY, said(("user", TEXT)), "[user]Red"),
    (PARTS, said(("user", "Red")), "[user]Red"),
    (PARTS, said(("user", TEXT)), "[user]Red"),
    (BOTH, said(("user", TEXT)), "[user]Red"),
    (PARTS, said(("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")),
     "[system]S[user]U[assistant]A[user]V"),
    (ANY, said(("system", "S"), ("user", "U"), ("developer", "T"), ("user", "V")),
     "[system]S[user]U[system]T[user]V"),
    (SYSTEM_FIRST, said(("system", "S"), ("developer", "T"), ("user", "U")),
     "[system]S\n\nT[user]U"),
    (SYSTEM_FIRST, said(("user", "U"), ("system", "S"), ("user", "V")),
     "[system]S[user]U[user]V"),
    (NO_SYSTEM + ANY, said(("system", "S"), ("user", "U")), "[user]S\n\nU"),
    (DROPS_SYSTEM, said(("system", "S"), ("user", "U")), "[user]S\n\nU"),
    (DROPS_SYSTEM, said(("system", "S")), "[user]S"),
    (NO_SYSTEM + PARTS, said(("system", "S"), ("user", TEXT)), "[user]SRed"),
    (ALTERNATES, said(("user", "U"), ("user", "V")), "[user]U\n\nV"),
    (ALTERNATES, said(("system", "S"), ("user", "U"), ("assistant", "A"),
                      ("assistant", "B"), ("user", "V")),
     "[user]S\n\nU[assistant]A\n\nB[user]V"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "messages", "expected"), FORMS)
def test_every_text_of_a_conversation_is_shown(fit, source, messages, expected):
    assert fit(source, messages) == expected


def history(number="call_0123456789abcdef01234567", arguments='{"x": 1}'):
    function = {"name": "look", "arguments": arguments}
    call = {"id": number, "type": "function", "function": function}
    return [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": number, "content": "R"},
    ]


HISTORIES = [
    (calls(" | tojson"), '[user]U[assistant]look({"x": 1})[tool]R'),
    (calls(""), '[user]U[assistant]look({"x": 1})[tool]R'),
    (IPYTHON, '[user]U[assistant]look({"x": 1})[ipython]R'),
    (NULL_ONLY, '[user]U[assistant]look({"x": 1})[tool]R'),
    (ANY, '[user]U[assistant]<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n'
     "</tool_call>[user]<tool_response>\nR\n</tool_response>"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}], ids=["text", "object"])
@pytest.mark.parametrize(("source", "expected"), HISTORIES)
def test_calls_are_written_in_the_form_of_the_template(
    fit, source, expected, arguments
):
    assert fit(source, history(arguments=arguments)) == expected


def test_ids_of_calls_and_results_agree_where_they_must_be_short(fit):
    source = calls(" | tojson", NINE) + "{{ messages[-1].tool_call_id }}"
    shown = fit(source, history())
    number = shown[-9:]
    assert number.isalnum()
    assert f"<{number}>look" in shown
    assert fit(source, history("a1B2c3D4e")).endswith("a1B2c3D4e")
    assert fit(source, history("another"))[-9:] != number


def test_messages_of_other_forms_are_left_to_the_template(fit):
    odd = {"role": "assistant", "content": None, "tool_calls": [{"b": 1}]}
    source = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    assert json.loads(fit(source, [odd])) == [{"b": 1}]


@pytest.mark.parametrize("content", ["U", [{"type": "text", "text": "U"}]])
def test_a_text_that_no_form_shows_is_refused(fit, content):
    with pytest.raises(RequestError, match="does not show"):
        fit("nothing", said(("user", content)))


def test_what_the_template_refuses_keeps_its_reason(fit):
    with pytest.raises(TemplateError, match="roles must alternate"):
        fit(ALTERNATES, said(("assistant", "A"), ("user", "U")))
