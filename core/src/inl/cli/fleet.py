"""``inl fleet``: the engines of a running server, and changes of them."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.fleet_api import FleetApi
from inl.cli.fleet_roll import Roll
from inl.cli.table import print_table
from inl.errors import RequestError

ACTIONS = "list|add|drain|remove|roll"


def run(
    action: Annotated[str, typer.Argument(metavar=ACTIONS, help="What to do.")],
    address: Annotated[
        str | None,
        typer.Argument(
            help="Engine, as HOST:PORT. roll: all engines without it; add: without it "
            "the server starts another one."
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(help="Server of the engines.")
    ] = "http://127.0.0.1:8000",
    admin_key: Annotated[
        str | None,
        typer.Option(help="Admin key of the server. [default: INL_ADMIN_KEY]"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Time that open requests have to finish; what is left goes on "
            "elsewhere. [default: the server's --drain-seconds]",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds in which an engine becomes what it is to."),
    ] = 600.0,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="roll: end each engine of --replicas before the next one starts, "
            "where there is no memory for both.",
        ),
    ] = False,
    as_json: arguments.Json = False,
) -> None:
    """List or change the engines behind the server at --url."""
    key = admin_key or os.environ.get("INL_ADMIN_KEY", "")
    server = FleetApi(url, key)
    if action not in ACTIONS.split("|"):
        raise RequestError(f"found {action!r:.40}, accepted: {ACTIONS}")
    if action == "list":
        _show(server.replicas(), as_json)
        return
    if action == "roll":
        Roll(server, seconds, wait, _say).run(address, in_place=in_place)
        return
    if address is None and action != "add":
        raise RequestError(f"{action}: found no ADDRESS; inl fleet list shows them")
    fields = {} if address is None else {"address": address}
    if action != "add" and seconds is not None:
        row = server.post(action, {**fields, "seconds": seconds})
    else:
        row = server.post(action, fields, wait)
    if action == "add":
        row |= server.until_ready(row["address"], wait)
    if as_json:
        print(json.dumps(row, ensure_ascii=False))
        return
    _say(_described(action, row))
    if row["scope"] == "server" and not row["is_local"]:
        _say("this server only, until it restarts; with --replica-file it is kept")


def _described(action: str, row: dict[str, Any]) -> str:
    """Return what an engine is now, in a line."""
    if action == "add":
        return f"{row['address']}: is ready, on {row['device']}"
    end = "; then it is gone" if action == "remove" else ""
    return f"{row['address']}: gets no requests; {row['open']} open ones finish{end}"


def _say(text: str) -> None:
    print(text, flush=True)


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    heads = ("address", "state", "device", "open", "cached", "reason")
    print_table(heads, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    total = row["prompt_tokens"]
    cached = f"{100 * row['cached_tokens'] / total:.0f} %" if total else ""
    reason = row["reason"]
    if row["slowness"] > 1:
        reason = reason or f"is {row['slowness']:.1f} times slower than others"
    places = f"{row['open']} of {row['places']}"
    return row["address"], row["state"], row["device"], places, cached, reason
