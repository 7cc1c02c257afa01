"""``inl chat`` with piped input, ``Conversation`` and ``Interrupt``."""

from __future__ import annotations

import json
import os
import signal

import pytest

from inl.cli.chat_commands import COMMANDS
from inl.cli.conversation import Conversation
from inl.cli.interrupt import PATIENCE, Interrupt
from inl.engine.core import StepRecord
from inl.errors import PromptTooLong, RequestError
from inl.spec.step import Bucket


def words(messages):
    """Encode messages as one token per word."""
    return [0] * sum(len(message["content"].split()) for message in messages)


def talk(*turns, system=None):
    made = Conversation(system)
    for question, answer in turns:
        made.ask(question)
        made.answer(answer)
    return made


def test_all_messages_are_visible_while_they_fit():
    made = talk(("a b", "c"), ("d", "e f"), system="s")
    assert made.fit(words, 7) == ([0] * 7, 0)
    assert [m["role"] for m in made.visible()] == [
        "system",
        *("user", "assistant") * 2,
    ]


def test_oldest_turns_are_dropped_and_the_system_prompt_stays():
    made = talk(("a b", "c"), ("d", "e f"), ("g", "h"), system="s")
    made.ask("i")
    assert made.fit(words, 5) == ([0] * 4, 2)
    assert [m["content"] for m in made.visible()] == ["s", "g", "h", "i"]
    assert made.fit(words, 5) == ([0] * 4, 0)  # and are not counted again
    assert made.turns == 4


def test_a_message_longer_than_the_context_drops_no_turns():
    made = talk(("a", "b"))
    made.ask("c d e f")
    with pytest.raises(PromptTooLong, match=r"found 4 tokens .* accepts 3"):
        made.fit(words, 3)
    assert len(made.visible()) == 3


def test_save_and_load_include_dropped_turns(tmp_path):
    made = talk(("a b c", "ü\n"), ("d", "e"), system="s")
    made.ask("f")
    assert made.fit(words, 4)[1] == 1
    made.save(tmp_path / "talk.json")
    other = Conversation("other")
    other.load(tmp_path / "talk.json")
    assert (other.system, other.messages, other.start) == ("s", made.messages, 0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read"),
        ("[]", "has no list 'messages'"),
        ('{"messages": 3}', "has no list 'messages'"),
        ('{"messages": [7]}', r"messages\[0\]: found 7"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]"),
        ('{"messages": [{"role": ["user"], "content": ""}]}', r"messages\[0\]"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', r"messages\[0\]"),
        (
            '{"messages": [{"role": "user", "content": "x"},'
            '{"role": "system", "content": "x"}]}',
            r"messages\[1\]",
        ),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_loading_an_invalid_file_changes_nothing(tmp_path, text, sentence):
    (tmp_path / "bad.json").write_text(text)
    made = talk(("a", "b"), system="s")
    with pytest.raises(RequestError, match=sentence):
        made.load(tmp_path / "bad.json")
    assert (made.system, made.turns) == ("s", 1)


def test_unwritable_and_unreadable_paths_raise_request_error(tmp_path):
    made = talk(("a", "b"))
    with pytest.raises(RequestError, match="cannot be written"):
        made.save(tmp_path / "no" / "talk.json")
    with pytest.raises(RequestError, match="cannot be read"):
        made.load(tmp_path / "no.json")


def record(decode_rows):
    return StepRecord(1, Bucket(1, 1), 1, 1, decode_rows, (1,))


def test_ctrl_c_raises_at_the_next_step():
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    with interrupt:
        interrupt.on_step(record(0))
        interrupt.on_step(record(1))
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.on_step(record(1))
        interrupt.reraise_foreign()
    assert (interrupt.stopped, interrupt.decode_steps) == (True, 2)
    assert signal.getsignal(signal.SIGINT) is before
    with interrupt:
        interrupt.on_step(record(0))
    assert not interrupt.stopped


def test_repeated_ctrl_c_raises_during_a_step():
    with Interrupt() as interrupt:
        for _ in range(PATIENCE - 1):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt.reraise_foreign()


STOPPED = "[stopped at 6 tokens; --max-tokens]\n"


@pytest.fixture
def chat(inl, tiny_folder, tmp_path):
    """Run ``inl chat`` with piped input lines."""

    def run(*lines, options=()):
        fixed = ("--model", str(tiny_folder), "--device", "reference")
        (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
        with (tmp_path / "lines").open() as given:
            return inl(
                "chat",
                *fixed,
                *("--max-tokens", "6", "--context", "256"),
                *options,
                stdin=given,
                env={"INL_CACHE": str(tmp_path / "cache")},
            )

    return run


def saved(path):
    return json.loads(path.read_text())["messages"]


def test_a_pipe_is_answered_line_by_line(chat, tmp_path):
    kept = tmp_path / "kept.json"
    lines = "Hello", "", "/stats", "And you?", f"/save {kept}", "/exit", "never"
    done = chat(*lines, options=("--seed", "0"))
    assert (done.returncode, done.stderr) == (0, 2 * STOPPED)
    messages = saved(kept)
    assert [m["content"] for m in messages[::2]] == ["Hello", "And you?"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    for message in messages[1::2]:
        assert message["content"] in done.stdout
    assert "tiny-chat on reference:0" in done.stdout
    assert "1 turn, 0 of them" in done.stdout


def test_a_seed_repeats_answers_and_retry_changes_them(chat, tmp_path):
    answers = []
    for name in "ab":
        kept = [tmp_path / f"{name}{at}" for at in range(2)]
        lines = "Hello", f"/save {kept[0]}", "/retry", f"/save {kept[1]}"
        chat(*lines, options=("--seed", "0"))
        answers.append([saved(path)[1]["content"] for path in kept])
        assert len(saved(kept[1])) == 2
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_commands_change_the_conversation(chat, tmp_path):
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    done = chat(
        "/system Be brief",
        "/system",
        "Hello",
        f"/save {first}",
        "/clear",
        "//slash",
        f"/load {first}",
        "More",
        f"/save {second}",
        options=("--system", "Be long"),
    )
    assert (done.returncode, done.stderr) == (0, 3 * STOPPED)
    assert "system: Be brief" in done.stdout
    assert saved(first)[0] == {"role": "system", "content": "Be brief"}
    assert [m["content"] for m in saved(second) if m["role"] == "user"] == [
        "Hello",
        "More",
    ]


def test_help_lists_every_command(chat):
    shown = chat("/help").stdout
    for name, command in COMMANDS.items():
        assert f"\n{command.usage} " in f"\n{shown}", name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/nope", "/nope: unknown command; accepted: /help, "),
        ("/save", "/save: found no file name"),
        ("/load /no/such", "cannot be read"),
        ("/retry", "/retry: there is no message"),
        ("x" * 400, "PromptTooLong: message: found "),
    ],
)
def test_an_error_in_piped_input_exits_with_2(chat, line, sentence):
    done = chat(line, "never")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_dropping_old_turns_is_reported(chat, tmp_path):
    kept = tmp_path / "kept.json"
    done = chat(*("y" * 90 for _ in range(4)), "/stats", f"/save {kept}")
    assert done.returncode == 0
    said = "no longer fit into 256 tokens)"
    assert sum(said in line for line in done.stderr.splitlines()) == 2
    assert "4 turns, 2 of them no longer in the context" in done.stdout
    assert len(saved(kept)) == 8


def test_a_model_without_a_template_is_refused(inl, tiny_folder, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in tiny_folder.iterdir():
        if file.name != "tokenizer_config.json":
            (plain / file.name).write_bytes(file.read_bytes())
    done = inl("chat", "--model", str(plain), "--device", "reference")
    assert done.returncode == 2
    assert (
        "plain: the model has no chat template; try: inl generate --raw" in done.stderr
    )


def test_invalid_sampling_options_fail_before_loading(inl):
    done = inl("chat", "--top-p", "2", "--model", "no-such-folder")
    assert done.returncode == 2
    assert done.stderr.startswith("inl: RequestError: top_p: found 2.0, accepts ")


@pytest.mark.full
def test_top_k_1_equals_greedy(chat, tmp_path):
    kept = [tmp_path / name for name in ("greedy", "filtered", "free")]
    chat("Hello", f"/save {kept[0]}", options=("--temperature", "0"))
    chat("Hello", f"/save {kept[1]}", options=("--top-k", "1"))
    chat("Hello", f"/save {kept[2]}", options=("--temperature", "3"))
    assert saved(kept[0]) == saved(kept[1])
    assert saved(kept[0]) != saved(kept[2])
