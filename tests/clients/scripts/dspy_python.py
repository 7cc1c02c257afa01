# /// script
# dependencies = ["dspy"]
# ///
"""DSPy, by LiteLLM's names of OpenAI and Ollama."""

from typing import Literal

import dspy
from cases import MODEL, QUESTION, TOKENS, URL, run

OPENAI = dspy.LM(
    f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", temperature=0,
    max_tokens=TOKENS, cache=False, num_retries=0,
)  # fmt: skip
OLLAMA = dspy.LM(
    f"ollama_chat/{MODEL}", api_base=f"{URL}/v1", api_key="none", temperature=0,
    max_tokens=TOKENS, cache=False, num_retries=0,
)  # fmt: skip


class Pick(dspy.Signature):
    """Pick a color."""

    question: str = dspy.InputField()
    color: Literal["red", "green", "blue"] = dspy.OutputField()


def plain():
    for each in (OPENAI, OLLAMA):
        (text,) = each(QUESTION)
        assert "Paris" in text if isinstance(text, str) else text


def structured():
    # DSPy does not know that this model has response_format: it is given by hand.
    color = {"type": "string", "enum": ["red", "green", "blue"]}
    schema = {
        "type": "object", "properties": {"color": color}, "required": ["color"],
        "additionalProperties": False,
    }  # fmt: skip
    shape = {"name": "pick", "strict": True, "schema": schema}
    lm = OPENAI.copy(response_format={"type": "json_schema", "json_schema": shape})
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Pick)(question="A color?").color in color["enum"]


run(plain, structured)
