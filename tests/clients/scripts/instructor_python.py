# /// script
# dependencies = ["instructor"]
# ///
"""Instructor, in each of its modes that OpenAI's API has."""

from typing import Literal

import instructor
import openai
from cases import MODEL, QUESTION, URL, run
from pydantic import BaseModel

OPTIONS = {
    "model": MODEL, "temperature": 0, "max_tokens": 100, "max_retries": 1,
    "messages": [{"role": "user", "content": QUESTION}],
}  # fmt: skip
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


def ask(mode, **options):
    patched = instructor.from_openai(client, mode=mode)
    return patched.chat.completions.create(response_model=Color, **OPTIONS, **options)


def tools():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        assert isinstance(ask(mode), Color), mode


def structured():
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Color)


def stream():
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = patched.chat.completions.create_partial(response_model=Color, **OPTIONS)
    assert last.name in ("red", "green", "blue")


run(tools, structured, stream)
