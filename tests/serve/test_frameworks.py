"""LangChain and LlamaIndex: the example scripts against a server process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
QUESTION = "Why is the sky blue? One sentence."
CALL = """
import json, runpy, sys
found = runpy.run_path(sys.argv[1])["run"](sys.argv[2])
found["structured"] = found["structured"].model_dump()
print(json.dumps(found))
"""
FRAMEWORKS = {
    "langchain": ("langchain_openai", "langchain-openai"),
    "llamaindex": ("llama_index.llms.openai_like", "llama-index-llms-openai-like"),
}
"""Module and distribution of each."""


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def interpreter(name):
    """Return a Python that has a framework; skips the test without one."""
    module, distribution = FRAMEWORKS[name]
    variable = f"INL_{name.upper()}_PYTHON"
    if found := os.environ.get(variable):
        return found
    if not is_installed(module):
        pytest.skip(
            f"needs {distribution} here, or {variable}=PYTHON of an environment with it"
        )
    return sys.executable


@pytest.mark.full
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_chats_streams_calls_and_gets_structures(name, server_url):
    script = EXAMPLES / f"{name}_client.py"
    command = [interpreter(name), "-c", CALL, str(script), server_url]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if command[0] == sys.executable:
        clean = {**os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="default", temperature=0, max_tokens=48,
            messages=[{"role": "user", "content": QUESTION}],
        )  # fmt: skip
    assert found["chat"] == found["stream"] == answer.choices[0].message.content
    assert found["tokens"] == answer.usage.completion_tokens
    assert found["chunks"] >= 1
    call = found["call"]
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Rome", "Oslo")
    assert call["args"]["days"] in (1, 2, 3)
    assert found["after the call"]
    assert found["structured"]["name"] in ("red", "green", "blue")
    assert isinstance(found["structured"]["is_warm"], bool)
