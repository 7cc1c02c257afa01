"""Generator of docs/engine-config.md: ``python -m inl.testing.config_page``."""

from __future__ import annotations

import sys

from inl.config import EngineConfig
from inl.testing.source_fields import Field, fields_of, markdown

HEAD = """\
# Engine configuration

Every field of `inl.EngineConfig`, in definition order. All fields are keyword arguments
and have a default. A value out of range raises `RequestError`. This page is written by
`python -m inl.testing.config_page > docs/engine-config.md`.

```python
from inl import EngineConfig

config = EngineConfig(backend="cpu", context=2048, max_batch=4)
```
"""


def config_page() -> str:
    """Return the Markdown of the whole page."""
    return "\n".join([HEAD, *map(_section, config_fields())])


def config_fields() -> list[Field]:
    """Return the fields of :class:`~inl.config.EngineConfig` that have a default."""
    return [field for field in fields_of(EngineConfig) if field.default]


def _section(field: Field) -> str:
    lines = (
        f"## {field.name}",
        f"`{field.type}`, default `{field.default}`",
        markdown(field.doc),
    )
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(config_page())
