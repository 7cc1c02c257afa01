"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inl.errors import RequestError

Model = Annotated[
    str | None,
    typer.Option(help="Model folder or GGUF file. [default: SmolLM2-135M-Instruct]"),
]
Device = Annotated[str, typer.Option(help='Device, such as "cpu" or "cuda:1".')]
Dtype = Annotated[str, typer.Option(help="Compute dtype.")]
KvDtype = Annotated[
    str, typer.Option(help="Dtype of the KV cache; int8 and fp8 halve its memory.")
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Quantize a checkpoint of floats while it is loaded: fp8, int8 or int4. "
        "[default: as stored]"
    ),
]
TensorParallel = Annotated[
    int, typer.Option(help="Number of devices, starting at --device.")
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=SIZE,...",
        help="Devices of one program, starting at --device: axes data, tensor, expert. "
        "[default: one device]",
    ),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
Seed = Annotated[
    int | None, typer.Option(help="Random seed. [default: a new one per request]")
]
TopK = Annotated[
    int, typer.Option(help="Sample from the k most likely tokens; 0 disables.")
]
TopP = Annotated[float, typer.Option(help="Nucleus sampling: cumulative probability.")]
MinP = Annotated[
    float, typer.Option(help="Minimum probability relative to the top token.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Values above 1 penalize repeated tokens.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")]
TrustControlTokens = Annotated[
    bool,
    typer.Option(
        "--trust-control-tokens",
        help="Encode control tokens in messages as such, not as plain text.",
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER",
        help="LoRA adapter in a PEFT folder; can be repeated.",
    ),
]
Speculation = Annotated[
    str | None,
    typer.Option(
        help='Source of drafted tokens that a step verifies: "ngram", or "model" or '
        '"eagle" with --draft-model. [default: none]'
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Small model with the same tokenizer, or a draft head's folder."),
]
DraftDevice = Annotated[
    str | None, typer.Option(help="Device of the draft model. [default: --device]")
]
MaxDrafts = Annotated[
    int | None,
    typer.Option(
        help="Drafted tokens of a sequence and step. [default: 15]", min=1, max=127
    ),
]
AdaptiveDrafts = Annotated[
    bool,
    typer.Option(
        "--adaptive-drafts/--no-adaptive-drafts",
        help="Choose the number of drafts from measured times, or verify all.",
    ),
]
AllowHosted = Annotated[
    bool,
    typer.Option(
        "--allow-hosted", help="Compute ops without a kernel in NumPy on the host."
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option(help="JSON file with schemas of functions for the chat template."),
]
Documents = Annotated[
    Path | None,
    typer.Option(help="JSON file with documents for the chat template."),
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Variable of the chat template, such as enable_thinking=false; "
        "can be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def adapters(pairs: list[str] | None) -> dict[str, str]:
    """Return the folders of ``--adapter`` by name; raises ``RequestError``."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder) or name in found:
            raise RequestError(
                f"--adapter: found {pair!r}, accepted: NAME=FOLDER, each name once"
            )
        found[name] = folder
    return found
