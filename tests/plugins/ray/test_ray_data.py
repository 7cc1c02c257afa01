"""``inl_ray.map_batches``: a completion for each row, in a cluster of two CPUs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import ray.data

import inl_ray
from inl import EngineConfig, InferenceEngine
from inl.errors import RequestError
from waiting import until

pytestmark = [
    # Ray sets fields of its own that it has deprecated, and leaves files open.
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OPTIONS = {"max_tokens": 6, "ignore_eos": True, "seed": 3, "temperature": 0.8}
CONTEXT = 64
PROMPTS = [f"{number} and {number + 1} are" for number in range(24)]
MESSAGES = [[{"role": "user", "content": each}] for each in PROMPTS[:4]]
TOO_LONG = "word " * 100


@pytest.fixture(scope="module")
def cluster():
    """Ray with two CPUs, whose processes find the packages under test."""
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "INL_PLUGINS": "inl_cpu.plugin,inl_ray.plugin",
        "OMP_NUM_THREADS": "1",
        "INL_THREADS": "1",
    }
    ray.init(
        "local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000,
        runtime_env={"env_vars": environment}, logging_level="warning",
        log_to_driver=False,
    )  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def config():
    return EngineConfig(backend="cpu", context=CONTEXT, max_batch=4)


@pytest.fixture(scope="module")
def engine(config):
    with InferenceEngine.from_pretrained(config=config) as engine:
        yield engine


def dataset(column, values, blocks=4):
    rows = [{"number": number, column: each} for number, each in enumerate(values)]
    return ray.data.from_items(rows, override_num_blocks=blocks)


def in_order(rows):
    rows = sorted(rows, key=lambda row: row["number"])
    assert [row["number"] for row in rows] == [*range(len(rows))]
    return rows


def test_each_row_gets_the_completion_of_an_engine(cluster, engine, config):
    names = {"answer": "text", "ids": "token_ids", "reason": "finish_reason"}
    data = inl_ray.map_batches(
        dataset("prompt", PROMPTS), config=config, columns=names, concurrency=2,
        batch_size=4, **OPTIONS,
    )  # fmt: skip
    rows = in_order(data.take_all())
    wanted = engine.generate(PROMPTS, **OPTIONS)
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["answer"] for row in rows] == [each.text for each in wanted]
    assert [tuple(row["ids"]) for row in rows] == [each.token_ids for each in wanted]
    assert {row["reason"] for row in rows} == {"length"}


def test_prompts_are_token_ids_or_messages_too(cluster, engine, config):
    ids = [engine.tokenizer.encode(each) for each in PROMPTS[:4]]
    for values in (ids, MESSAGES):
        wanted = [each.text for each in engine.generate(values, **OPTIONS)]
        data = inl_ray.map_batches(
            dataset("given", values, 1), config=config, prompts="given", **OPTIONS
        )
        rows = in_order(data.take_all())
        assert [row["text"] for row in rows] == wanted
        assert all(row["prompt_tokens"] > 2 for row in rows)


def test_a_row_that_is_refused_is_named_or_ends_the_job(cluster, engine, config):
    values = [PROMPTS[0], TOO_LONG, PROMPTS[1]]
    data = inl_ray.map_batches(
        dataset("prompt", values, 1), config=config, errors="error", **OPTIONS
    )
    rows = in_order(data.take_all())
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "tokens" in rows[1]["error"]
    assert rows[1]["text"] is None
    wanted = engine.generate(PROMPTS[:2], **OPTIONS)
    assert [rows[0]["text"], rows[2]["text"]] == [each.text for each in wanted]
    data = inl_ray.map_batches(dataset("prompt", values, 1), config=config, **OPTIONS)
    with pytest.raises(Exception, match="tokens"):
        data.take_all()


def actors():
    """Return the processes of the pool."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if words.startswith(b"ray::") and b"Completions" in words:
                found.append(int(path.name))
    return found


def test_the_program_of_the_readme_runs(cluster, capsys):
    page = Path(__file__).parents[3] / "plugins" / "inl-ray" / "README.md"
    (program,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    exec(compile(program, page.name, "exec"), {})
    (row,) = eval(capsys.readouterr().out)
    assert row["id"] == 7
    assert "Paris" in row["text"]


def seconds_of(pid):
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_rows_of_an_actor_that_is_killed_are_answered_once(
    cluster, engine, config, tmp_path
):
    """It is killed while it computes the rows that have to wait for the first ones."""
    options = OPTIONS | {"max_tokens": 40}
    may_go, has_begun = tmp_path / "may_go", tmp_path / "has_begun"

    def wait(batch):
        while batch["number"].min() >= 4 and not may_go.exists():
            time.sleep(0.1)
        return batch

    def tell(batch):
        has_begun.touch()
        return batch

    data = dataset("prompt", PROMPTS, 6).map_batches(wait, num_cpus=0.1)
    data = inl_ray.map_batches(data, config=config, batch_size=4, **options)
    data = data.map_batches(tell, num_cpus=0.1)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(data.take_all)
        until(lambda: has_begun.exists() or rows.done())
        (pid,) = actors()
        before = seconds_of(pid)
        may_go.touch()
        until(lambda: seconds_of(pid) > before + 0.1)
        os.kill(pid, signal.SIGKILL)
        wanted = [each.text for each in engine.generate(PROMPTS, **options)]
        assert [row["text"] for row in in_order(rows.result())] == wanted


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"columns": {"a": "tokens"}},
            "columns: found tokens, accepts text, token_ids",
        ),
        ({"columns": {"prompt": "text"}}, "found the columns prompt, prompt"),
        ({"n": 2}, "n: found 2, accepts 1"),
        ({"config": EngineConfig(backend="ray:cpu:0")}, "found backend 'ray:cpu:0'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(cluster, given, sentence):
    with pytest.raises(RequestError, match=sentence):
        inl_ray.map_batches(dataset("prompt", PROMPTS), **given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"prompts": "question"}, "found no column 'question', accepts one of number"),
        ({"columns": {"number": "text"}}, "found the columns number in the dataset"),
    ],
)
def test_columns_that_do_not_fit_the_dataset_end_the_job(
    cluster, config, given, sentence
):
    data = inl_ray.map_batches(dataset("prompt", PROMPTS, 1), config=config, **given)
    with pytest.raises(Exception, match=sentence):
        data.take_all()
