"""Options shared by several commands; those that go together are in option_groups."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from inl.errors import RequestError

DEFAULT_MODEL = "[default: SmolLM2-135M-Instruct]"
MODEL = "Folder, GGUF file, org/name or org/name:Q4_K_M"
Model = Annotated[str | None, typer.Option(help=f"{MODEL}. {DEFAULT_MODEL}")]
ModelArgument = Annotated[str | None, typer.Argument(help=f"{MODEL}. {DEFAULT_MODEL}")]
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
Context = Annotated[
    int | None, typer.Option(help="Tokens of prompt and output.", min=1)
]
Prompt = Annotated[
    str | None,
    typer.Argument(
        help="Text, @FILE, or - for standard input, which is read without PROMPT too. "
        "@@ begins a text with @."
    ),
]
System = Annotated[str | None, typer.Option(help="System prompt.")]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|TEXT",
        help="JSON schema that the answer follows: a file, or the schema itself.",
    ),
]
Image = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE", help="Image before the text of PROMPT; can be repeated."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature; 0 is greedy. [default: the model's, or 0]"
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER",
        help="LoRA adapter in a PEFT folder; can be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def adapters(pairs: list[str] | None, *, single: bool = False) -> dict[str, str]:
    """Return the folders of ``--adapter`` by name; raises ``RequestError``.

    single: whether there may be one at most.
    """
    found: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder) or name in found:
            raise RequestError(
                f"--adapter: found {pair!r}, accepted: NAME=FOLDER, each name once"
            )
        found[name] = folder
    if single and len(found) > 1:
        raise RequestError(
            f"--adapter: found {len(found)}, one prompt accepts one adapter"
        )
    return found


def adapter_settings(folders: dict[str, str]) -> dict[str, Any]:
    """Return the fields of ``EngineConfig`` for the folders of adapters."""
    from inl.adapters.folder import highest_rank

    if not folders:
        return {}
    rank = max(map(highest_rank, folders.values()))
    return {"adapters": folders, "max_adapter_rank": rank}
