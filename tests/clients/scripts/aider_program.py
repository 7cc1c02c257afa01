# /// script
# dependencies = ["aider-chat"]
# ///
"""aider: a message from the command line, by OpenAI's and by Ollama's API."""

import os
import subprocess
import sys
import tempfile

from cases import MODEL, URL, run


def aider(name, **env):
    words = [
        "-m", "aider", "--model", name, "--message", "/ask Say hello.", "--no-git",
        "--yes-always", "--no-check-update", "--no-show-model-warnings",
        "--analytics-disable", "--no-pretty", "--no-browser", "--no-detect-urls",
        "--map-tokens", "0", "--timeout", "200",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, capture_output=True, text=True,
            env=os.environ | {"HOME": folder} | env, timeout=400,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Tokens:" in done.stdout, done.stdout
    assert "litellm." not in done.stdout, "an error of its client: " + done.stdout


def stream():
    aider(f"openai/{MODEL}", OPENAI_API_BASE=f"{URL}/v1", OPENAI_API_KEY="none")


def ollama():
    aider(f"ollama_chat/{MODEL}", OLLAMA_API_BASE=URL)


run(stream, ollama)
