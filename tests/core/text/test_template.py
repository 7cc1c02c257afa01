from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from inl.errors import MissingPackage, RequestError, TemplateError
from inl.text import template as module
from inl.text.sandbox import MAX_MEMORY, SOFT_SECONDS, Session
from inl.text.template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]


def apply(source, messages=HELLO, **variables):
    template = ChatTemplate(
        source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )
    try:
        return template.apply(messages, **variables)
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", "hello"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}",
         "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ ['é'] | tojson(true, 1) }}", '[\n "\\u00e9"\n]'),
        ("{{ {'b': [1, 2], 'a': 3} | tojson(false, none, (',', ':'), true) }}",
         '{"a":3,"b":[1,2]}'),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}"
         "{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro f(context) %}[{{ context }}]{% endmacro %}{{ f(context='x') }}",
         "[x]"),
        ("{% generation %}{{ 'y' }}{% endgeneration %}", "y"),
        ("{{ 'ab' * 2 ~ 2 ** 3 ~ '%03d' % 7 }}", "abab8007"),
        ("{{ '%s-%s' | format(1, 2) }}{{ '{:>3}'.format('z') }}", "1-2  z"),
        ("{{ ' x '.strip().center(5) | replace(' ', '.') }}", "..x.."),
        ("{{ tools is none }}{{ documents is none }}{{ nothing }}", "TrueTrue"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)  # fmt: skip
def test_supported_template_features(source, expected):
    assert apply(source) == expected


def test_variables_reach_the_template():
    source = "{{ tools[0] }}{{ bos_token }}{{ add_generation_prompt }}{{ mood }}"
    found = apply(
        source, tools=["t"], bos_token="B", add_generation_prompt=False, mood="\ud800é"
    )
    assert found == "tBFalse\ud800é"


def test_strftime_now_gives_the_current_date():
    today = datetime.date.today().isoformat()
    later = datetime.date.today().isoformat()
    assert apply("{{ strftime_now('%Y-%m-%d') }}") in (today, later)


DOUBLE = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(70) %%}"
    "{%% set ns.x = %s %%}{%% endfor %%}%s"
)

REFUSED = {
    "attribute": ("a\n{{ ''.__class__ }}", ["line 2", "'__class__'", "'str'"]),
    "subscript": ("{{ ''['__class__'] }}", ["line 1", "'__class__'"]),
    "filter attr": ("{{ messages | attr('__class__') }}", ["line 1", "'__class__'"]),
    "map": ("{{ messages | map(attribute='__class__') | list }}", ["'__class__'"]),
    "format": ("{{ '{0.__class__}'.format(1) }}", ["line 1", "'__class__'"]),
    "globals": ("{{ cycler.__init__.__globals__ }}", ["line 1", "'__init__'"]),
    "function": ("{{ raise_exception.__globals__ }}", ["line 1", "'__globals__'"]),
    "namespace": ("{{ namespace(__class__=1) }}", ["line 1", "'__class__'"]),
    "set": (
        "{% set n = namespace() %}\n{% set n.__x = 1 %}",
        ["line 2", "'__x'", "public"],
    ),
    "append": ("{{ messages.append(1) }}", ["line 1", "'append'", "do not modify"]),
    "include": ("\n\n{% include 'x' %}", ["line 3", "include", "accepted: for, if"]),
    "import": ("{% import 'x' as y %}", ["line 1", "import"]),
    "extends": ("{% extends 'x' %}", ["line 1", "extends"]),
    "repeat": ("{{ 'a' * 10**9 }}", ["line 1", "1000000000 times", "up to 1000000"]),
    "repeat list": ("{{ [0] * 10**9 }}", ["line 1", "1000000000 times"]),
    "repeat left": ("{{ 10**9 * 'a' }}", ["line 1", "1000000000 times"]),
    "power": ("{{ 2 ** (10 ** 8) }}", ["line 1", "4096 bits"]),
    "range": ("{% for i in range(10**9) %}{% endfor %}", ["1000000000", "'range'"]),
    "center": ("{{ 'x'.center(10**9) }}", ["line 1", "1000000000", "'center'"]),
    "center filter": ("{{ 'x' | center(10**9) }}", ["1000000000", "'center'"]),
    "percent": ("{{ '%1000000000d' % 1 }}", ["line 1", "%1000000000d", "1000"]),
    "percent star": ("{{ '%*d' % (10**9, 1) }}", ["line 1", "%*d"]),
    "percent filter": ("{{ '%1000000000d' | format(1) }}", ["%1000000000d"]),
    "width": ("{{ '{:1000000000d}'.format(1) }}", ["line 1", "{:1000000000d}"]),
    "width inside": ("{{ '{:{}d}'.format(1, 10**9) }}", ["line 1", "1000000000"]),
    "join": (
        "{{ ('a' * 100000) | list | join('b' * 100000) | length }}",
        ["line 1", "768 MiB"],
    ),
    "text doubles": (
        DOUBLE % ("'aaaaaaaa'", "ns.x ~ ns.x", ""),
        ["line 1", "accepted: less"],
    ),
    "list doubles": (DOUBLE % ("[1, 2]", "ns.x + ns.x", ""), ["line 1", "'+'"]),
    "nests": (DOUBLE % ("[1]", "[ns.x, ns.x]", "{{ ns.x }}"), ["accepted: less"]),
    "hash": (DOUBLE % ("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"), ["accepted: less"]),
    "loops": (
        "x\n{% for a in range(99999) %}{% for b in range(99999) %}\n"
        "{% endfor %}{% endfor %}",
        ["line 2", "longer than 1.5 seconds"],
    ),
    "text": (
        "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        ["33554432 characters"],
    ),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ["too deep"]),
    "calls": (
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
        "{{ m(60) }}",
        ["line 1", "longer than 1.5 seconds"],
    ),
    "nesting": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ["too deep"]),
    "syntax": ("{% if %}", ["line 1", "Expected an expression"]),
    "unclosed": ("x\n{{ 'a", ["line 2"]),
    "filter": ("{{ 'x' | nosuch }}", ["line 1", "nosuch"]),
    "undefined": ("\n{{ foo.bar }}", ["line 2", "'foo' is undefined"]),
    "division": ("{{ 1 / 0 }}", ["line 1", "ZeroDivisionError"]),
    "its own": ("{{ raise_exception('no tools') }}", ["line 1", "no tools"]),
}


SLOW = ("nests", "hash", "calls", "text")
"""Refused when their time has passed, as "loops"."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full) if n in SLOW else n for n in REFUSED],
)
def test_forbidden_template_operations(name):
    source, parts = REFUSED[name]
    with pytest.raises(TemplateError) as caught:
        apply(source)
    message = str(caught.value)
    missing = [part for part in ["chat template", *parts] if part not in message]
    assert missing == [], message
    assert len(message) < 400


IGNORING = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from inl.errors import TemplateError
from inl.text.template import ChatTemplate
from inl.text.sandbox import Session

source = "x\\n{% for a in range(99999) %}{% for b in range(99999) %}\\n" \\
    "{% endfor %}{% endfor %}"
template = ChatTemplate(source)
try:
    template.apply([{"content": "hello"}])
except TemplateError as error:
    print(error)
template.close()
session = Session()
session.answer(session.compile, source)
print(session.answer(session.render, {}), end="")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_limit_interrupts_where_interrupts_are_ignored():
    done = subprocess.run(
        [sys.executable, "-c", IGNORING], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    found = done.stdout.splitlines()
    assert len(found) == 2
    for line in found:
        assert "longer than 1.5 seconds of processor time" in line
    assert "line 2: " in found[0]
    assert json.loads(found[1])["line"] == 2


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_time_that_other_processes_use_does_not_count():
    """The template's process is stopped for longer than its limits."""
    session = Session()

    def late(_):
        time.sleep(SOFT_SECONDS + 1)
        return {"text": "ok"}

    assert json.loads(session.answer(late, None)) == {"text": "ok"}


MEASURE = """
import resource, sys
from inl.errors import TemplateError
from inl.text.template import ChatTemplate
for source in sys.argv[1:]:
    template = ChatTemplate(source)
    try:
        sys.exit("rendered: " + template.apply([{"content": "hello"}])[:80])
    except TemplateError:
        template.close()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
"""
"""Run in a new interpreter: RUSAGE_CHILDREN reports the largest child ever."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space on Linux")
def test_memory_stays_bounded():
    sources = [REFUSED[name][0] for name in ("text doubles", "join")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *sources],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MAX_MEMORY


def test_a_refusal_leaves_the_template_usable():
    source = "{% if messages[0].content == 'x' %}{{ ''.__class__ }}{% endif %}ok"
    template = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises(TemplateError):
            template.apply([{"role": "user", "content": "x"}])
        assert template.apply(HELLO) == "ok"
    template.close()
    assert template.apply(HELLO) == "ok"
    template.close()


def test_one_process_serves_all_calls(monkeypatch):
    started, start = [], module.BoundedChild

    def counted(program):
        started.append(start(program))
        return started[-1]

    monkeypatch.setattr(module, "BoundedChild", counted)
    template = ChatTemplate("{{ messages[0].content }}")
    for turn in range(100):
        assert template.apply([{"content": f"n{turn}"}]) == f"n{turn}"
    assert len(started) == 1
    template.close()


def test_threads_may_share_a_template():
    template = ChatTemplate("{{ messages[0].content }}")
    found = {}

    def ask(number):
        for turn in range(20):
            text = f"{number}/{turn}"
            found[text] = template.apply([{"content": text}])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    template.close()
    assert len(found) == 80
    assert all(text == key for key, text in found.items())


def test_messages_that_are_not_json_are_refused():
    with pytest.raises(RequestError, match=r"messages: .*accepted"):
        apply("x", [{"content": object()}])


def test_a_missing_package_gives_the_install_command(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install .*core\[text\]"):
        apply("x")


def test_long_conversations_are_rendered():
    messages = [{"role": "user", "content": "word " * 2000}] * 200
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert len(apply(source, messages)) == 2_000_000


def test_an_interrupted_rendering_is_not_the_reply_to_the_next(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}")

    def render(text):
        return template.apply([{"role": "user", "content": text}])

    def interrupted(*_):
        raise KeyboardInterrupt

    def first():
        assert render("first") == "first"

    # Interrupted in a request, and while the process starts.
    for prepare in (first, template.start):
        prepare()
        with monkeypatch.context() as patch:
            # The request is sent, and its reply not yet read.
            patch.setattr(module.BoundedChild, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                render("second")
        assert render("third") == "third"
        template.close()


def test_a_process_that_was_started_before_serves():
    template = ChatTemplate("{{ messages[0].content }}", tool_use=ChatTemplate("tools"))
    template.start()
    process = template._process
    template.start()
    assert template._process is process
    assert template.tool_use._process is None
    template.start(with_tools=True)
    assert template.apply([{"content": "one"}], tools=[]) == "tools"
    assert template.apply([{"content": "two"}]) == "two"
    assert template._process is process
    template.close()
    template.start()
    template._process._child.kill()
    with pytest.raises(TemplateError, match="its process ended"):
        template.apply([{"content": "lost"}])
    assert template.apply([{"content": "three"}]) == "three"
    template.close()


def test_a_malformed_template_is_refused_where_it_is_applied():
    template = ChatTemplate("{% if %}", where="m.gguf: chat_template")
    template.start()
    for _ in range(2):
        with pytest.raises(TemplateError, match=r"m\.gguf: chat_template, line 1"):
            template.apply(HELLO)
    template.close()


def test_a_rejected_conversation_keeps_the_process():
    template = ChatTemplate("{% if messages|length > 1 %}{{ messages.x.y }}{% endif %}")
    template.apply(HELLO)
    before = template._process
    with pytest.raises(TemplateError):
        template.apply([*HELLO, *HELLO])
    assert template._process is before
    assert template.apply(HELLO) == ""
    template.close()


def test_a_process_with_many_open_files_renders():
    resource = pytest.importorskip("resource")
    template = ChatTemplate("{{ messages[0].content }}")
    output = os.dup(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("the system allows fewer open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [output]
    try:
        while files[-1] < 1100:
            files.append(os.dup(output))
        assert template.apply(HELLO) == "hello"
    finally:
        for number in files:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        template.close()
