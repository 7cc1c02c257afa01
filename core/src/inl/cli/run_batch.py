"""``inl run-batch``: answers a file of requests without a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from inl.cli import arguments
from inl.cli.bench import bar
from inl.cli.option_groups import SpeculativeOptions, with_groups
from inl.cli.serve import check_packages
from inl.cli.serve_models import make_server, named_models
from inl.errors import InlError, RequestError


@with_groups
def run(
    *,
    requests: Annotated[Path, typer.Argument(help="JSON lines of OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(help="File that answers are added to.")],
    model: arguments.Model = None,
    engine_options: SpeculativeOptions,
    adapter: arguments.Adapter = None,
    max_batch: Annotated[
        int, typer.Option(help="Requests that run at the same time.", min=1)
    ] = 32,
    context: arguments.Context = None,
) -> None:
    """Answer REQUESTS in ANSWERS. Continues where an earlier run ended."""
    check_packages()
    from inl.serve.batch_file import finished_ids, only_run, read_requests, run_batch
    from inl.serve.settings import ServerConfig

    with _named_errors(), ExitStack() as stack:
        todo = list(read_requests(requests))
        stack.enter_context(only_run(answers))
        finished = finished_ids(answers)
        todo = [each for each in todo if each["custom_id"] not in finished]
        kept = stack.pop_all()
    with kept:
        print(f"{len(finished)} answered before, {len(todo)} to do", file=sys.stderr)
        if not todo:
            return
        config = engine_options.config(
            max_batch=max_batch,
            context=context,
            **arguments.adapter_settings(arguments.adapters(adapter)),
        )
        models = named_models(model, None, ())
        with (
            make_server(models, ServerConfig(max_queue=128), config) as server,
            answers.open("a", encoding="utf-8", errors="backslashreplace") as output,
            bar(len(todo)) as tick,
        ):
            work = run_batch(
                server.app, todo, output, concurrency=2 * max_batch, tick=tick
            )
            failed = asyncio.run(work)
    if failed:
        raise InlError(
            f"{answers}: {failed} requests failed; see their lines. Another run tries "
            "them again"
        )


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(f"{error.filename}: {error.strerror}") from error
