"""Write the address of the repository into the metadata of all packages:
``python deploy/set_urls.py https://host/owner/name``. For a release, before the build.
"""

from __future__ import annotations

import sys
from pathlib import Path

PLACEHOLDER = "https://inl.example"
FILES = ("core", "libs/*", "plugins/*")


def main(address: str) -> None:
    root = Path(__file__).parents[1]
    for pattern in FILES:
        for path in root.glob(f"{pattern}/pyproject.toml"):
            text = path.read_text("utf-8")
            if PLACEHOLDER not in text:
                raise SystemExit(f"{path}: found no {PLACEHOLDER}")
            lines = [line for line in text.splitlines() if "does not exist" not in line]
            text = "\n".join(lines).replace(PLACEHOLDER, address)
            path.write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
