"""Options that several commands share, worded once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(help="Folder or GGUF file; SmolLM2-135M-Instruct if none."),
]
Device = Annotated[str, typer.Option(help='Such as "cpu" or "cuda:1".')]
Dtype = Annotated[str, typer.Option(help="Dtype to compute in.")]
KvDtype = Annotated[
    str, typer.Option(help="Dtype of the cache; int8 takes half the memory on a CPU.")
]
TensorParallel = Annotated[
    int, typer.Option(help="Devices that share the model, from the named one on.")
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling; random by default.")]
TopK = Annotated[int, typer.Option(help="Of so many likeliest; 0 is all.")]
TopP = Annotated[
    float, typer.Option(help="Of the likeliest with this much probability.")
]
MinP = Annotated[
    float, typer.Option(help="Of those with this share of the likeliest's.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1, what was said is less likely.")
]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
