"""Ray Data: a completion for each row of a dataset, by engines in a pool of actors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from ray.data import ActorPoolStrategy

from inl import EngineConfig, InferenceEngine
from inl.errors import InlError, RequestError
from inl.workers.address import parse_worker
from inl_ray import cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from ray.data import Dataset

    from inl import Completion

TYPES = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(),
    "cached_tokens": pa.int64(),
    "first_token_seconds": pa.float64(),
    "seconds": pa.float64(),
}
"""Attributes of a completion that can be columns."""
COLUMNS = {
    "text": "text",
    "finish_reason": "finish_reason",
    "prompt_tokens": "prompt_tokens",
}

UNBOUNDED = 1 << 30


def map_batches(
    dataset: Dataset,
    model: str | Path | None = None,
    *,
    prompts: str = "prompt",
    columns: Mapping[str, str] = COLUMNS,
    errors: str | None = None,
    config: EngineConfig | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 256,
    **options: Any,
) -> Dataset:
    """Return a dataset with the columns of another one and those of completions.

    Nothing is computed before the dataset is consumed. Each actor of the pool holds an
    engine; rows are in any order, as of ``Dataset.map_batches``.

    model: a path that all hosts have, or a name; ``None`` is the default model.
    prompts: column with a text, a list of token ids or a list of messages in each row.
    columns: attribute of :class:`inl.Completion` by the name of its column. errors:
    column with the message where a row is refused, such as one whose prompt is too
    long, and null elsewhere; ``None`` raises it, which ends the job. config: its device
    must be one of the actor's host, of which Ray keeps as many as the placement has.
    concurrency: engines, or the least and the most of them. batch_size: rows that an
    engine gets at a time; it computes ``config.max_batch`` of them together. options:
    of :class:`inl.engine.options.GenerationOptions`, for all rows. Raises
    :class:`~inl.errors.RequestError`.
    """
    config = config or EngineConfig()
    _check(prompts, columns, errors, options)
    if parse_worker(config.backend) is not None:
        raise RequestError(
            f"map_batches: found backend {config.backend!r:.80}, accepts a device of "
            "the host of each actor, such as cuda"
        )
    wanted = cluster.demand(str(config.backend))
    wanted = {name: each * config.division.count for name, each in wanted.items()}
    least, most = (
        (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    )
    return dataset.map_batches(
        Completions,
        fn_constructor_args=(
            model, config, prompts, dict(columns), errors, options,
        ),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=wanted.pop("CPU", 0.0),
        num_gpus=wanted.pop("GPU", 0.0),
        resources=wanted,
    )  # fmt: skip


def _check(
    prompts: str,
    columns: Mapping[str, str],
    errors: str | None,
    options: Mapping[str, Any],
) -> None:
    if unknown := sorted(set(columns.values()) - TYPES.keys()):
        raise RequestError(
            f"map_batches: columns: found {', '.join(unknown)}, accepts "
            f"{', '.join(TYPES)}"
        )
    names = [prompts, *columns, *([] if errors is None else [errors])]
    if len(set(names)) < len(names):
        raise RequestError(
            f"map_batches: found the columns {', '.join(names)}; accepts each name once"
        )
    if options.get("n", 1) != 1:
        raise RequestError(
            f"map_batches: n: found {options['n']!r:.40}, accepts 1: each row has one "
            "completion"
        )


class Completions:
    """The actor: holds an engine, and adds columns to batches of rows."""

    def __init__(
        self,
        model: str | Path | None,
        config: EngineConfig,
        prompts: str,
        columns: Mapping[str, str],
        errors: str | None,
        options: Mapping[str, Any],
    ) -> None:
        device = str(config.backend)
        if device != "auto":
            # The process sees the devices that Ray gave it, and no others.
            device = f"{device.partition(':')[0]}:0"
        # What Ray hands to the actor waits in the engine, however long it is.
        config = replace(
            config, backend=device, max_queued_requests=UNBOUNDED,
            max_queued_tokens=UNBOUNDED,
        )  # fmt: skip
        self._engine = InferenceEngine.from_pretrained(model, config)
        self._prompts, self._columns = prompts, columns
        self._errors, self._options = errors, options

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield a batch with the columns of the completions of its rows."""
        self._check_names(batch.column_names)
        rows = batch.column(self._prompts).to_pylist()
        found = await asyncio.gather(*(self._complete(each) for each in rows))
        for name, attribute in self._columns.items():
            values = [getattr(each, attribute, None) for each in found]
            column = pa.array(values, TYPES[attribute])
            batch = batch.append_column(name, column)
        if self._errors is not None:
            messages = [str(e) if isinstance(e, InlError) else None for e in found]
            batch = batch.append_column(self._errors, pa.array(messages, pa.string()))
        yield batch

    async def _complete(self, prompt: Any) -> Completion | RequestError:
        if isinstance(prompt, list):
            # Arrow gives all messages of a column the same fields.
            prompt = [
                {key: value for key, value in each.items() if value is not None}
                if isinstance(each, dict)
                else each
                for each in prompt
            ]
        try:
            found: Completion = await self._engine.agenerate(prompt, **self._options)
        except RequestError as error:
            if self._errors is None:
                raise
            return error
        return found

    def _check_names(self, names: list[str]) -> None:
        if self._prompts not in names:
            raise RequestError(
                f"map_batches: prompts: found no column {self._prompts!r:.80}, accepts "
                f"one of {', '.join(names)}"
            )
        added = {*self._columns, self._errors} & set(names)
        if added:
            raise RequestError(
                f"map_batches: found the columns {', '.join(sorted(map(str, added)))} "
                "in the dataset already; name others by columns"
            )
