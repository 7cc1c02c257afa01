"""``inl run-batch``: answers a file of requests without a server."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.bench import bar
from inl.cli.option_groups import SpeculativeOptions, with_groups
from inl.cli.serve import check_packages
from inl.cli.serve_fleet import check_replicas, make_fleet
from inl.cli.serve_models import make_server, named_models
from inl.cli.serve_options import ReplicaOptions
from inl.errors import InlError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from inl.fleet.server import FleetServer
    from inl.serve.batch_calls import App

QUEUE, FLEET_QUEUE = 128, 1 << 16
"""Requests that wait to run: on one engine, and on all engines of a fleet."""


@with_groups
def run(
    *,
    requests: Annotated[Path, typer.Argument(help="JSON lines of OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(help="File that answers are added to.")],
    model: arguments.Model = None,
    engine_options: SpeculativeOptions,
    replicas: ReplicaOptions,
    adapter: arguments.Adapter = None,
    max_batch: Annotated[
        int,
        typer.Option(help="Requests that run at the same time on an engine.", min=1),
    ] = 32,
    context: arguments.Context = None,
) -> None:
    """Answer REQUESTS in ANSWERS. Continues where an earlier run ended."""
    check_packages()
    from inl.serve.batch_calls import run_batch
    from inl.serve.batch_file import find_answers, index_requests, only_run, unanswered
    from inl.serve.settings import ServerConfig

    check_replicas(replicas, has_model=model is not None)
    # A line for each request would hide the others, and the progress bar.
    logging.getLogger("inl.serve.access").disabled = True
    with _named_errors(), ExitStack() as stack:
        ids = index_requests(requests)
        stack.enter_context(only_run(answers))
        find_answers(answers, ids)
        kept = stack.pop_all()
    with kept:
        todo = len(ids) - ids.answered
        print(f"{ids.answered} answered before, {todo} to do", file=sys.stderr)
        if not todo:
            return
        config = engine_options.config(
            max_batch=max_batch,
            context=context,
            **arguments.adapter_settings(arguments.adapters(adapter)),
        )
        models = named_models(model, None, ())
        failed = 0

        async def answer_all(app: App, concurrency: Callable[[], int]) -> None:
            nonlocal failed
            lines = unanswered(requests, ids)
            with (
                answers.open("a", encoding="utf-8", errors="backslashreplace") as file,
                bar(todo, "answering") as tick,
            ):
                failed = await run_batch(
                    app, lines, file, concurrency=concurrency, tick=tick
                )

        if replicas.is_fleet:
            server = make_fleet(
                replicas, models, ServerConfig(max_queue=FLEET_QUEUE), config, None,
                model,
            )  # fmt: skip
            asyncio.run(_answer(server, answer_all))
        else:
            with make_server(models, ServerConfig(max_queue=QUEUE), config) as single:
                asyncio.run(answer_all(single.app, lambda: 2 * max_batch))
    if failed:
        raise InlError(
            f"{answers}: {failed} requests failed; see their lines. Another run tries "
            "them again"
        )


async def _answer(
    server: FleetServer, answer_all: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """Answer by a fleet: each place of an engine has another request that waits."""
    places = server.client.admission
    await server.answer(partial(answer_all, concurrency=lambda: 2 * places.max_running))


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(f"{error.filename}: {error.strerror}") from error
