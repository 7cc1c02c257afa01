"""lm-evaluation-harness against a server, and on an engine of its own process: its
log-likelihoods are transformers'.

Needs lm-eval in this environment, or ``INL_LM_EVAL_PYTHON``, a Python that has it, for
the engine with what INL needs.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
import transformers

from byte_tokens import byte_rules
from http_servers import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
VARIABLE = "INL_LM_EVAL_PYTHON"
ROWS = [
    {"question": "The sky is", "choices": ["blue", "made of cheese", "a river"]},
    {"question": "Two and two make", "choices": ["five", "four", "a green horse"]},
    {"question": "A cat has four", "choices": ["wheels", "legs", "moons of Jupiter"]},
]
SHARED = """
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
"""
TASKS = {
    "tiny_choice": SHARED + """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 1
metric_list:
  - metric: acc
""",
    "tiny_lines": SHARED + """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}. {{choices[1]}}, or {{choices[2]}}?"
metric_list:
  - metric: word_perplexity
""",
}  # fmt: skip


def interpreter():
    """Return a Python that has lm-eval; skips the test without one."""
    if found := os.environ.get(VARIABLE):
        return found
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip(f"needs lm-eval[api] here, or {VARIABLE}=PYTHON of another place")
    return sys.executable


@pytest.fixture
def model(tmp_path):
    """A tiny Llama over bytes, and its folder."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, bos_token_id=256, eos_token_id=257, pad_token_id=257,
    )  # fmt: skip
    folder = tmp_path / "model"
    found = transformers.LlamaForCausalLM(config).eval()
    found.save_pretrained(folder)
    rules = byte_rules()
    rules.add_special_tokens(["<begin>", "<end>"])
    rules.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return found, folder, rules


def server_words(url, settings="tokenized_requests=False,num_concurrent=4"):
    """The command's words for a server."""
    settings += f",model=default,base_url={url}/v1/completions,max_length=512"
    settings += ",tokenizer_backend=remote"
    return ["-m", "lm_eval", "--model", "local-completions", "--model_args", settings]


def continuation_words(url, settings):
    """The words of a server's adapter, which asks for continuations only."""
    *_, settings = server_words(url, settings)
    example = EXAMPLES / "lm_eval_server.py"
    return [example, "--model", "inl-server", "--model_args", settings]


def engine_words(python, model):
    """The command's words for an engine; skips the test where INL cannot be loaded."""
    loads = [python, "-c", "import lm_eval, inl, pluggy, tokenizers"]
    if subprocess.run(loads, capture_output=True).returncode:
        pytest.skip(f"needs INL and tokenizers in {python}")
    settings = f"model={model},backend=reference,dtype=float32"
    example = EXAMPLES / "lm_eval_engine.py"
    return [example, "--model", "inl", "--model_args", settings]


def evaluate(python, words, folder, **variables):
    """Return the requests and results of each task, by name."""
    tasks = folder / "tasks"
    tasks.mkdir()
    lines = [json.dumps(row) + "\n" for row in ROWS]
    (tasks / "rows.jsonl").write_text("".join(lines))
    for name, text in TASKS.items():
        text = f"task: {name}\n" + text.replace("FOLDER", str(tasks))
        (tasks / f"{name}.yaml").write_text(text)
    command = [python, *words, "--tasks", ",".join(TASKS)]
    command += [
        "--include_path",
        tasks,
        "--log_samples",
        "--output_path",
        folder / "out",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": folder}
    offline |= variables
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [*map(str, command)], check=True, env={**clean, **{k: str(v) for k, v in
                                                          offline.items()}},
        cwd=folder,
    )  # fmt: skip
    found = {}
    for name in TASKS:
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def log_likelihood(model, ids, count):
    """Return the log-probability of the last ``count`` ids, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(
        logits[at - 1, ids[at]].item() for at in range(len(ids) - count, len(ids))
    )


def is_greedy(model, ids, count):
    """Whether each of the last ``count`` ids is the most likely one."""
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    return best[len(ids) - count - 1 : -1] == ids[len(ids) - count :]


@pytest.mark.long
def test_log_likelihoods_of_a_task_are_those_of_transformers(model, tmp_path):
    reference, folder, rules = model
    python = interpreter()
    with ServerProcess(str(folder), "--dtype", "float32") as server:
        found = evaluate(python, server_words(server.url), tmp_path)
    compare(found, reference, rules)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "batch"), [("num_concurrent=4", 1), ("tokenized_requests=False", 3)]
)
def test_continuations_of_a_task_are_those_of_transformers(
    model, tmp_path, settings, batch
):
    reference, folder, rules = model
    python = interpreter()
    with ServerProcess(str(folder), "--dtype", "float32") as server:
        words = continuation_words(server.url, settings)
        words += ["--batch_size", batch]
        found = evaluate(python, words, tmp_path)
        counters = urlopen(f"{server.url}/metrics").read().decode()
    compare(found, reference, rules)
    # The harness's own model generates a token with each score.
    (generated,) = re.findall(r"^inl\S*generation_tokens\S* (\S+)$", counters, re.M)
    assert float(generated) == 0


@pytest.mark.long
def test_log_likelihoods_of_an_engine_are_those_of_transformers(model, tmp_path):
    reference, folder, rules = model
    python = interpreter()
    words = engine_words(python, folder)
    path = os.environ.get("PYTHONPATH", "")
    compare(evaluate(python, words, tmp_path, PYTHONPATH=path), reference, rules)


def compare(found, reference, rules):
    """Check the log-likelihoods of both tasks, and which of them are greedy."""

    def encode(text):
        return rules.encode(text).ids

    compared = 0
    for sample in found["tiny_choice"]:
        for index, response in enumerate(sample["filtered_resps"]):
            text, continuation = sample["arguments"][f"gen_args_{index}"].values()
            ids = encode(text) + encode(continuation)
            count = len(encode(continuation))
            wanted = log_likelihood(reference, ids, count)
            assert math.isclose(float(response[0]), wanted, abs_tol=2e-3)
            assert (str(response[1]) == "True") == is_greedy(reference, ids, count)
            compared += 1
    for sample in found["tiny_lines"]:
        text = sample["arguments"]["gen_args_0"]["arg_0"]
        ids = [257, *encode(text)]  # the harness puts the end token before
        wanted = log_likelihood(reference, ids, len(ids) - 1)
        (response,) = sample["filtered_resps"]
        value = response[0] if isinstance(response, list) else response
        assert math.isclose(float(value), wanted, abs_tol=2e-2)
        compared += 1
    assert compared == 12
