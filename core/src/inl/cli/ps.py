"""``inl ps``: the models that a running server has loaded."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from typing import Annotated, Any

import typer

from inl.bounded_json import parse_object
from inl.cli import arguments
from inl.cli.devices import show_bytes
from inl.cli.table import print_table
from inl.errors import InvalidJson, RequestError

LONG_SECONDS = 10 * 365 * 86400
"""A model that expires later is never unloaded."""

TIMEOUT_SECONDS = 10.0

MOST_BYTES = 1 << 20


def run(
    url: Annotated[
        str, typer.Argument(help="Server, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server. [default: INL_API_KEY]")
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """List the models that the server at URL has loaded."""
    rows = _loaded(url, api_key or os.environ.get("INL_API_KEY", ""))
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    heads = ("name", "size", "in", "context", "until")
    print_table(heads, [_cells(row) for row in rows])


def _loaded(url: str, key: str) -> list[dict[str, Any]]:
    """Return the rows of ``/api/ps``; raises :class:`RequestError`."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise RequestError(f"{url}: accepts a URL such as http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(f"{url.rstrip('/')}/api/ps", headers=headers)
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            body = response.read(MOST_BYTES)
        rows = parse_object(body, url).get("models")
    except HTTPError as error:
        hint = "; send one with --api-key" if error.code == 401 else ""
        raise RequestError(f"{url}: status {error.code}{hint}") from error
    except InvalidJson as error:
        raise RequestError(f"{error}; accepts the URL of inl serve") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise RequestError(
            f"{url}: no server answers: {reason}; start one with: inl serve"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestError(f"{url}: found no list of models; accepts inl serve's URL")
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size, on_device = row.get("size") or 0, row.get("size_vram") or 0
    place = "device" if on_device else "memory"
    context = f"{row.get('context_length', '')}"
    until = str(row.get("expires_at", ""))
    return str(row.get("name")), show_bytes(size), place, context, _until(until)


def _until(text: str) -> str:
    """Return the local time at which a model is unloaded, if it is."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return text
    if found.timestamp() - time.time() > LONG_SECONDS:
        return "the server stops"
    return found.astimezone().isoformat(" ", "seconds")
