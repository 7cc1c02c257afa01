"""Short names of models, such as ``llama3.2:1b``, for Hugging Face repositories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KIND: Final = "Q4_K_M"
"""The GGUF file of each repository that is downloaded, as Ollama's default is."""

REPOSITORIES: Final[Mapping[str, Mapping[str, str]]] = {
    "smollm2": {
        "1.7b": "bartowski/SmolLM2-1.7B-Instruct-GGUF",
        "135m": "bartowski/SmolLM2-135M-Instruct-GGUF",
        "360m": "bartowski/SmolLM2-360M-Instruct-GGUF",
    },
    "llama3.1": {"8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"},
    "llama3.2": {
        "3b": "bartowski/Llama-3.2-3B-Instruct-GGUF",
        "1b": "bartowski/Llama-3.2-1B-Instruct-GGUF",
    },
    "qwen2.5": {
        "7b": "bartowski/Qwen2.5-7B-Instruct-GGUF",
        "0.5b": "bartowski/Qwen2.5-0.5B-Instruct-GGUF",
        "1.5b": "bartowski/Qwen2.5-1.5B-Instruct-GGUF",
        "3b": "bartowski/Qwen2.5-3B-Instruct-GGUF",
        "14b": "bartowski/Qwen2.5-14B-Instruct-GGUF",
        "32b": "bartowski/Qwen2.5-32B-Instruct-GGUF",
    },
    "qwen2.5-coder": {
        "7b": "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF",
        "1.5b": "bartowski/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    },
    "qwen3": {
        "8b": "bartowski/Qwen_Qwen3-8B-GGUF",
        "0.6b": "bartowski/Qwen_Qwen3-0.6B-GGUF",
        "1.7b": "bartowski/Qwen_Qwen3-1.7B-GGUF",
        "4b": "bartowski/Qwen_Qwen3-4B-GGUF",
    },
    "gemma2": {
        "9b": "bartowski/gemma-2-9b-it-GGUF",
        "2b": "bartowski/gemma-2-2b-it-GGUF",
    },
    "gemma3": {
        "4b": "bartowski/google_gemma-3-4b-it-GGUF",
        "1b": "bartowski/google_gemma-3-1b-it-GGUF",
    },
    "mistral": {"7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF"},
    "phi3.5": {"3.8b": "bartowski/Phi-3.5-mini-instruct-GGUF"},
    "deepseek-r1": {
        "7b": "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF",
        "1.5b": "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF",
    },
}
"""Family -> tag -> repository; the first tag of a family is its ``latest``."""

HOSTS: Final = (
    "hf.co/",
    "huggingface.co/",
    "https://hf.co/",
    "https://huggingface.co/",
)


def hub_text(text: str) -> str:
    """Return a name of Hugging Face for one that Ollama accepts, else the text.

    ``llama3.2``, ``llama3.2:latest`` and ``llama3.2:1b`` are of the table;
    ``hf.co/org/name:Q4_K_M`` is ``org/name:Q4_K_M``.
    """
    for host in HOSTS:
        if text.startswith(host):
            return text.removeprefix(host).removesuffix(":latest")
    family, _, tag = text.lower().partition(":")
    tags = REPOSITORIES.get(family)
    if tags is None:
        return text
    wanted = next(iter(tags)) if tag in ("", "latest") else tag
    return f"{tags[wanted]}:{KIND}" if wanted in tags else text


def short_names() -> list[str]:
    """Return all short names with their tags."""
    return [f"{family}:{tag}" for family, tags in REPOSITORIES.items() for tag in tags]
