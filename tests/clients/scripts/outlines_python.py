# /// script
# dependencies = ["outlines[openai]", "ollama"]
# ///
"""Outlines over HTTP: its models of vLLM, OpenAI and Ollama."""

from typing import Literal

import ollama
import openai
import outlines
from cases import MODEL, QUESTION, TOKENS, URL, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
VLLM = outlines.from_vllm(client, MODEL)
OPENAI = outlines.from_openai(client, MODEL)
OLLAMA = outlines.from_ollama(ollama.Client(host=URL), MODEL)


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


def plain():
    for each in (VLLM, OPENAI):
        assert each(QUESTION, max_tokens=TOKENS, temperature=0)
    assert OLLAMA(QUESTION, options={"num_predict": TOKENS})


def stream():
    assert "".join(VLLM.stream(QUESTION, max_tokens=TOKENS))


def structured():
    for each in (VLLM, OPENAI):
        text = each("A color?", Color, max_tokens=60)
        assert Color.model_validate_json(text), each
    assert Color.model_validate_json(OLLAMA("A color?", Color))
    assert VLLM("Yes?", Literal["yes", "no"], max_tokens=8) in ("yes", "no")
    year = VLLM("A year?", outlines.types.Regex(r"[12][0-9]{3}"), max_tokens=12)
    assert 1000 <= int(year) <= 2999


run(plain, stream, structured)
