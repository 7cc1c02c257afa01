"""``python -m inl`` is ``inl``."""

from __future__ import annotations

from inl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
