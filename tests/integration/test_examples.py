"""The programs of examples/python, run as their first lines say, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from inl import EngineConfig, InferenceEngine

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def run(name, *words, given=""):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *words],
        input=given, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_chat_knows_what_was_said_before():
    questions = "What is the capital of France?\nAnd of Italy?\n"
    out = run("chat_app", "smollm2-135m-instruct", "cpu", given=questions)
    assert out.index("Paris") < out.index("Rome")
    assert out.endswith("> ")


def test_a_chat_drops_its_oldest_turns():
    module = load("chat_app")
    config = EngineConfig(backend="cpu", context=512)
    with InferenceEngine.from_pretrained(config=config) as engine:
        chat = module.Chat(engine)
        for number in range(30):
            user = {"role": "user", "content": f"Remember the number {number}."}
            chat.messages += [user, {"role": "assistant", "content": "Yes."}]
        assert len(engine.chat_ids(chat.messages)) > engine.context
        assert "".join(chat.ask("What is the capital of France?"))
    assert chat.messages[0] == module.SYSTEM
    assert [each["role"] for each in chat.messages[1:3]] == ["user", "assistant"]
    assert "number 29" in chat.messages[-4]["content"]
    assert "number 0." not in str(chat.messages)


def test_a_batch_job_continues(tmp_path):
    first = run("batch_job", tmp_path, "--device", "cpu")
    assert "Paris" in first.partition("France: ")[2].partition("\n")[0]
    answers = tmp_path / "answers.jsonl"
    lines = answers.read_text().splitlines()
    assert {json.loads(line)["custom_id"] for line in lines} == {
        "France", "Italy", "Japan", "Egypt",
    }  # fmt: skip
    answers.write_text("".join(line + "\n" for line in lines[:2]))
    second = run("batch_job", tmp_path, "--device", "cpu")
    named = [line.partition(":")[0] for line in second.splitlines()]
    assert named == ["Egypt", "France", "Italy", "Japan"]
    assert answers.read_text().splitlines()[:2] == lines[:2]


def test_a_backend_in_one_file_passes_its_check_and_answers():
    out = run("one_file_backend")
    assert "mini:0 passes all" in out
    assert "mini:0 says: Paris." in out
