"""``inl models``: cached models, known architectures, and facts about one model."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from inl.cache_dir.packed_folder import PackedFile, packed_files, packed_folder
from inl.cache_dir.packed_folder import prune as prune_packed
from inl.cache_dir.private_folder import IS_SUPPORTED, PrivateFolder, Untrusted
from inl.checkpoints.hub.resolve import DEFAULT, DEFAULT_NAME, cache_folder
from inl.cli import arguments
from inl.cli.devices import show_bytes
from inl.cli.table import print_table
from inl.errors import InlError
from inl.plugin import registry


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder, GGUF file or name to inspect; lists models if omitted."
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Remove the cached packed weights; the next start packs them again.",
        ),
    ] = False,
    as_json: arguments.Json = False,
) -> None:
    """List cached models and architectures, or inspect MODEL."""
    if prune:
        if model is not None:
            raise typer.BadParameter("--prune takes no MODEL")
        _prune(as_json=as_json)
        return
    if model is not None:
        from inl.cli.model_facts import model_facts, show_facts

        facts = model_facts(model)
        print(json.dumps(facts, ensure_ascii=False) if as_json else show_facts(facts))
        return
    rows, architectures = cached_models(), architecture_rows()
    if as_json:
        listing = {
            "cache": str(cache_folder()),
            "models": rows,
            "packed": packed_weights(),
            "architectures": architectures,
        }
        print(json.dumps(listing, ensure_ascii=False))
        return
    lines = [_cells(row) for row in rows]
    if (packed := packed_weights())["files"]:
        size = show_bytes(packed["bytes"])
        lines.append(("packed weights", "cached", size, packed["place"]))
    print_table(("model", "state", "size", "place"), lines)
    print()
    names = [(row["name"], row["plugin"]) for row in architectures]
    print_table(("architecture", "plugin"), names)


def cached_models() -> list[dict[str, Any]]:
    """Return the default model, files in the cache folder, and Hugging Face's cache."""
    folder = cache_folder()
    default = folder / DEFAULT.member.rpartition("/")[2]
    cached = default.is_file()
    rows = [
        {
            "name": DEFAULT_NAME,
            "state": "cached" if cached else "not fetched",
            "bytes": default.stat().st_size if cached else None,
            "place": str(default),
        }
    ]
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    rows += [
        {
            "name": file.name,
            "state": "cached",
            "bytes": file.stat().st_size,
            "place": str(file),
        }
        for file in files
        if file != default and file.is_file()
    ]
    return rows + _hugging_face()


def packed_weights() -> dict[str, Any]:
    """Return the folder, number and bytes of cached packed weights."""
    path = packed_folder()
    found: list[PackedFile] = []
    # A folder that cannot be used holds nothing that is used.
    if IS_SUPPORTED:
        with suppress(OSError, Untrusted), PrivateFolder(path) as folder:
            found = packed_files(folder)
    size = sum(file.size for file in found)
    return {"place": str(path), "files": len(found), "bytes": size}


def _prune(*, as_json: bool) -> None:
    """Remove packed weights, and print what was removed and the bytes freed."""
    path, removed = packed_folder(), list[PackedFile]()
    try:
        if IS_SUPPORTED and path.exists():
            with PrivateFolder(path) as folder:
                removed = prune_packed(folder)
    except (OSError, Untrusted) as error:
        raise InlError(f"{path}: {error}; remove it with: rm -r '{path}'") from error
    freed = sum(file.size for file in removed)
    if as_json:
        names = [{"name": file.name, "bytes": file.size} for file in removed]
        print(json.dumps({"place": str(path), "removed": names, "bytes": freed}))
        return
    for file in removed:
        print(f"removed {path / file.name}  {show_bytes(file.size)}")
    print(f"{len(removed)} file{'s'[: len(removed) != 1]}, {show_bytes(freed)} freed")


def _hugging_face() -> list[dict[str, Any]]:
    if find_spec("huggingface_hub") is None:
        return []
    hub = import_module("huggingface_hub")
    try:
        repos = hub.scan_cache_dir().repos
    except hub.CacheNotFound:
        return []
    return [
        {
            "name": str(repo.repo_id),
            "state": "cached",
            "bytes": int(repo.size_on_disk),
            "place": str(repo.repo_path),
        }
        for repo in sorted(repos, key=lambda repo: str(repo.repo_id))
        if repo.repo_type == "model"
    ]


def architecture_rows() -> list[dict[str, str]]:
    """Return every registered architecture and the plugin that provides it."""
    known = registry().models()
    return [{"name": name, "plugin": known[name].package} for name in sorted(known)]


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["name"], row["state"], show_bytes(row["bytes"]), row["place"]
