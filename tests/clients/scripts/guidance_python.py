# /// script
# dependencies = ["guidance", "openai"]
# ///
"""Guidance over HTTP, by its model class for vLLM's server."""

from cases import MODEL, QUESTION, TOKENS, URL, run
from guidance import assistant, gen, select, user
from guidance.models.experimental import VLLMModel


def language_model():
    return VLLMModel(model=MODEL, base_url=f"{URL}/v1", api_key="none", echo=False)


def plain():
    lm = language_model()
    with user():
        lm += QUESTION
    with assistant():
        lm += gen("answer", max_tokens=TOKENS, temperature=0.0)
    assert lm["answer"]


def structured():
    lm = language_model()
    with user():
        lm += "A color?"
    with assistant():
        lm += select(["red", "green", "blue"], name="color")
    assert lm["color"] in ("red", "green", "blue")
    with user():
        lm += "A year?"
    with assistant():
        lm += gen("year", regex=r"[12][0-9]{3}", max_tokens=TOKENS)
    assert 1000 <= int(lm["year"]) <= 2999


run(plain, structured)
