# /// script
# dependencies = ["llm", "llm-ollama"]
# ///
"""Simon Willison's ``llm``: as a server like OpenAI's, and by its Ollama plugin."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import MODEL, QUESTION, URL, check_color, run

HOME = tempfile.TemporaryDirectory()
SETTINGS = """
- model_id: chat
  model_name: {model}
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
- model_id: text
  model_name: {model}
  api_base: {url}/v1
  completion: true
"""
Path(HOME.name, "extra-openai-models.yaml").write_text(
    SETTINGS.format(model=MODEL, url=URL)
)
ENV = os.environ | {"LLM_USER_PATH": HOME.name, "OLLAMA_HOST": URL}
ENV["OPENAI_API_KEY"] = "none"
OLLAMA = f"ollama/{MODEL}:latest"
FEW = ("-o", "temperature", "0", "-o", "max_tokens", "24")
FEW_OLLAMA = ("-o", "temperature", "0", "-o", "num_predict", "24")


def llm(*words):
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plain():
    assert "Paris" in llm(QUESTION, "-m", "chat", "--no-stream", *FEW)
    assert llm("Once", "-m", "text", *FEW)
    assert OLLAMA in llm("models")
    assert "Paris" in llm(QUESTION, "-m", OLLAMA, "--no-stream", *FEW_OLLAMA)


def stream():
    whole = llm(QUESTION, "-m", "chat", "--no-stream", *FEW)
    assert llm(QUESTION, "-m", "chat", *FEW) == whole
    assert llm(QUESTION, "-m", OLLAMA, *FEW_OLLAMA) == whole
    assert llm("-c", "And of Italy?", "-m", "chat", *FEW)


def tools():
    # "auto": the small model may answer in words.
    llm(QUESTION, "-m", "chat", "-T", "llm_version", *FEW)
    llm(QUESTION, "-m", OLLAMA, "-T", "llm_version", *FEW_OLLAMA)


def structured():
    color = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": ["red", "green", "blue"]},
            "is_warm": {"type": "boolean"},
        },
        "required": ["name", "is_warm"],
    }
    for model in ("chat", OLLAMA):
        check_color(llm("A color?", "-m", model, "--schema", json.dumps(color)))


run(plain, stream, tools, structured)
