"""The same weights in every peer's format, converted once and kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.commands import Failed, run_logged

HERE = Path(__file__).parent
SECONDS = 1800
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Converters look things up on a model hub unless told not to."""


def folder_of(source: Path, cache: Path) -> Path:
    """Folder of a file's other forms, named by its digest. Raises :class:`Failed`."""
    try:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise Failed(f"{source}: {error.strerror}") from error
    return cache / digest


@dataclass(frozen=True, slots=True)
class Made:
    """A model in one format."""

    path: Path
    weight_bytes: int | None
    """Bytes of weights that a token reads; ``None`` where the peer tells itself."""


@dataclass(frozen=True, slots=True)
class Models:
    """Formats of one GGUF file, in a folder of the cache named by its digest."""

    source: Path
    folder: Path
    converter: Path
    """Interpreter of the environment for converting."""
    log: Path

    @classmethod
    def of(cls, source: Path, cache: Path, converter: Path) -> Models:
        """Raises :class:`Failed` where the file cannot be read."""
        folder = folder_of(source, cache / "models")
        folder = folder.with_name(f"{folder.name}-{converter.parts[-3]}")
        folder.mkdir(parents=True, exist_ok=True)
        return cls(source, folder, converter, cache / "logs" / "convert.log")

    def facts(self) -> dict[str, Any]:
        """Vocabulary, the question in tokens, and float32's answer to it."""
        target = self.folder / "facts.json"
        if not target.exists():
            part = target.with_suffix(".part")
            self._convert("facts", self.source, part)
            part.rename(target)
        found: dict[str, Any] = json.loads(target.read_text("utf-8"))
        return found

    def texts(self, answers: list[list[int]]) -> list[str]:
        """Turn answers of tokens into text."""
        file = self.folder / "answers.json"
        file.write_text(json.dumps(answers), "utf-8")
        self._convert("text", self.source, file)
        found: list[str] = json.loads(file.read_text("utf-8"))
        return found

    def make(self, kind: str, python: Path) -> Made:
        """Make a format of the catalog, unless it is there.

        python: the peer's own interpreter, for a converter that is part of the peer.
        Raises :class:`Failed`.
        """
        if kind == "source":
            return Made(self.source, self.facts()["weight_bytes"])
        target = self.folder / kind.replace(":", "-")
        if not target.exists():
            # Renamed when complete, so an interrupted conversion is taken for none.
            part = target.with_name(f"{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            self._fill(kind, part, python)
            part.rename(target)
        note = target / "weight_bytes.json"
        size = json.loads(note.read_text("utf-8")) if note.exists() else None
        files = sorted(target.glob("*.gguf"))
        return Made(files[0] if files else target, size)

    def _fill(self, kind: str, part: Path, python: Path) -> None:
        name, _, form = kind.partition(":")
        if name == "openvino":
            self._convert(f"gguf:{form}", self.source, part)
            (file,) = part.glob("*.gguf")
            self._run(python, HERE / "save_openvino.py", file)
        elif name in ("onnx", "ctranslate2"):
            folder = self.make("hugging-face", python).path
            self._convert(kind, folder, part)
        else:
            self._convert(kind, self.source, part)

    def _convert(self, kind: str, source: Path, target: Path) -> None:
        self._run(self.converter, HERE / "convert.py", kind, source, target)

    def _run(self, *command: object) -> None:
        run_logged(list(command), self.log, limit=SECONDS, environment=OFFLINE)
