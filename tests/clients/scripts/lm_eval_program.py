# /// script
# dependencies = ["lm-eval[api]"]
# ///
"""lm-evaluation-harness: log-likelihoods and generation of a task in a local file."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import MODEL, URL, run

ADAPTER = Path(__file__).parents[3] / "examples" / "python" / "lm_eval_server.py"
ROWS = [
    {"question": "What is the capital of France?", "choices": ["Paris", "a cat"],
     "answer": 0},
    {"question": "How many legs has a dog?", "choices": ["blue", "four"], "answer": 1},
]  # fmt: skip
TASK = """
task: {kind}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: {kind}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
CHOICE = """
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
UNTIL = """
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def evaluate(
    kind, rest, *words,
    model="local-completions", path="completions", program=("-m", "lm_eval"),
):  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (folder / "task.yaml").write_text(TASK.format(kind=kind, rows=rows) + rest)
        places = (
            f"model={MODEL},base_url={URL}/v1/{path},tokenizer_backend=remote,"
            "tokenized_requests=False,num_concurrent=2"
        )
        command = [
            sys.executable, *program, "--tasks", kind, "--include_path", name,
            "--model", model, "--model_args", places, "--output_path", name, *words,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=500,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": name},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        (found,) = folder.rglob("results_*.json")
        return json.loads(found.read_text())["results"][kind]


def scores():
    # The scores of both right answers are higher.
    assert evaluate("multiple_choice", CHOICE)["acc,none"] == 1


def continuations():
    ours = {"model": "inl-server", "program": (ADAPTER,)}
    assert evaluate("multiple_choice", CHOICE, **ours)["acc,none"] == 1


def plain():
    assert "exact_match,none" in evaluate("generate_until", UNTIL)


def chat():
    evaluate(
        "generate_until", UNTIL, "--apply_chat_template",
        model="local-chat-completions", path="chat/completions",
    )  # fmt: skip


run(scores, continuations, plain, chat)
