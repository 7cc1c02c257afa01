"""``inl tokens``: imported when the command runs."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    files: Annotated[list[Path], typer.Argument(help="Texts in UTF-8.")],
    model: Annotated[str | None, typer.Option(help="Folder, file or name.")] = None,
) -> None:
    """Count the tokens of FILES, as MODEL's tokenizer divides them."""
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.executor.checkpoint_formats import open_checkpoint

    tokenizer = open_checkpoint(resolve_model(model)).tokenizer()
    for file in files:
        print(f"{len(tokenizer.encode(file.read_text('utf-8'))):8,} {file}")
