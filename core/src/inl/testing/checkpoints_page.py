"""Generator of a table: ``python -m inl.testing.checkpoints_page docs/checkpoints.md``.

Writes the table of architectures of that page again: a row for each family of the
registry, in the order of ``page_data/families.json``, which has what code cannot say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from inl.checkpoints.gguf.names import FAMILIES as GGUF
from inl.checkpoints.gguf.names import MOE_FAMILIES as GGUF_MOE
from inl.errors import PluginError
from inl.plugin.builtin import FAMILIES

DATA: Final = Path(__file__).parent / "page_data" / "families.json"
HEAD: Final = (
    "| in `architectures` | models | in GGUF | compared with transformers "
    "| supported config fields |\n|---|---|---|---|---|\n"
)
COMPARED: Final = {
    "logits": "logits",
    "configs": "drawn configs",
    "images": "images",
    "text": "text without images",
    "family": "by the family of its text",
}
"""Kinds of comparisons, and their names on the page."""


def checkpoints_page(page: str) -> str:
    """Return a page with its table of architectures written again.

    Raises :class:`~inl.errors.PluginError` for a page without the table.
    """
    start, named = page.find(HEAD[: HEAD.index(" models")]), "in `architectures`"
    if start < 0:
        raise PluginError(f"page: found no table that begins with {named!r}")
    end = page.index("\n\n", start) + 1
    return page[:start] + family_table() + page[end:]


def family_table() -> str:
    """Return the Markdown of the table.

    Raises :class:`~inl.errors.PluginError` if a family of the registry is not in the
    data, which the message names.
    """
    rows = read_rows()
    listed = {name for row in rows for name in row["names"]}
    missing = [name for name, _, _ in FAMILIES if name not in listed]
    if missing:
        raise PluginError(f"{DATA.name}: found no {', '.join(missing)}; add rows")
    return HEAD + "".join(map(_line, rows))


def read_rows() -> list[dict[str, Any]]:
    """Return the rows of the data.

    ``names``: of classes; ``models``; ``fields``: what is supported, and what not;
    ``compared``: of :data:`COMPARED`; ``gguf``: in place of what the registry says.
    """
    rows: list[dict[str, Any]] = json.loads(DATA.read_text("utf-8"))
    return rows


def _line(row: dict[str, Any]) -> str:
    cells = (
        ", ".join(f"`{name}`" for name in row["names"]),
        row["models"],
        row.get("gguf") or ", ".join(f"`{one}`" for one in gguf_of(row["names"][0])),
        ", ".join(COMPARED[kind] for kind in row["compared"]),
        row["fields"],
    )
    return "|".join(["", *(f" {cell} " if cell else " " for cell in cells), "\n"])


def gguf_of(name: str) -> Iterable[str]:
    """Return the values of ``general.architecture`` of a class."""
    found = (
        key
        for table in (GGUF, GGUF_MOE)
        for key, family in table.items()
        if family.architecture == name
    )
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(checkpoints_page(target.read_text("utf-8")), "utf-8")
