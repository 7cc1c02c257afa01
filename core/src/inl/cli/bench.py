"""``inl bench``: measures speed, memory and the share of memory bandwidth used."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.bench_show import check_plot, save_plot, show
from inl.cli.option_groups import EngineOptions, with_groups
from inl.cli.progress import loading_bar
from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.engine.benchmark import Speed
    from inl.engine.inference_engine import InferenceEngine


@with_groups
def run(
    *,
    model: arguments.Model = None,
    engine_options: EngineOptions,
    prompt_tokens: Annotated[
        int, typer.Option(help="Prompt length in tokens.", min=1)
    ] = 512,
    tokens: Annotated[
        int, typer.Option(help="Generated tokens per prompt.", min=1)
    ] = 128,
    batch: Annotated[str, typer.Option(help="Batch sizes to measure.")] = "1,8",
    runs: Annotated[
        int, typer.Option(help="Measured runs, after one warm-up run.", min=1)
    ] = 5,
    as_json: arguments.Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot to this file, such as bench.png.")
    ] = None,
) -> None:
    """Measure load time, first token, prefill, decode and memory.

    Prints medians of runs.
    """
    batches = parse_batches(batch)
    if plot is not None:
        check_plot(plot)  # fail before minutes of measurement
    config = engine_options.config(
        max_batch=max(batches), context=prompt_tokens + tokens
    )
    if not config.has_tiers:
        config = replace(config, prefix_cache=False)
    report = _measure(model, config, batches, prompt_tokens, tokens, runs)
    if plot is not None:
        save_plot(report, plot)
    print(json.dumps(report, ensure_ascii=False) if as_json else show(report))


def parse_batches(text: str) -> list[int]:
    """Read ``"1,8"``. Raises :class:`RequestError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 0 < int(p) <= 4096 for p in parts):
        raise RequestError(
            f"batch: found {text!r:.60}, accepted: whole numbers from 1 to 4096, "
            "separated by commas"
        )
    return sorted({int(part) for part in parts})


def _measure(
    model: str | None,
    config: EngineConfig,
    batches: list[int],
    prompt_tokens: int,
    tokens: int,
    runs: int,
) -> dict[str, Any]:
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.engine.benchmark import StepClock, measure_repeated, measure_speed
    from inl.engine.inference_engine import InferenceEngine
    from inl.executor.model_loader import open_model

    path = resolve_model(model)
    clock = StepClock()
    began = time.perf_counter()
    language = open_model(path)
    engine = InferenceEngine(
        language, config=config, progress=loading_bar(), on_step=clock.on_step
    )
    loaded = time.perf_counter() - began
    # As workers do: garbage collection over all loaded objects would pause steps.
    gc.collect()
    gc.freeze()
    with engine, bar(len(batches) * (runs + 1)) as tick:
        speeds = [
            measure_speed(
                engine,
                clock,
                batch=batch,
                prompt_tokens=prompt_tokens,
                tokens=tokens,
                runs=runs,
                tick=tick,
            )
            for batch in batches
        ]
        repeated = None
        if engine.tiers is not None:
            repeated = measure_repeated(
                engine, batch=batches[-1], prompt_tokens=prompt_tokens
            )._asdict()
        peak = peak_bytes()
        cached = prompt_tokens + tokens / 2
        moved = _memory(engine, speeds, cached)
    return {
        "model": language.name,
        "device": engine.device,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "runs": runs,
        "load_seconds": loaded,
        "peak_host_bytes": peak,
        "device_memory": device_memory(engine),
        "repeated": repeated,
        "expert_loads": _loads(engine),
        **moved,
    }


def _loads(engine: InferenceEngine) -> dict[str, Any] | None:
    """Return the tokens of each expert, if steps counted them."""
    loads = engine.core.expert_loads
    if not loads.steps:
        return None
    return {
        "steps": loads.steps, "imbalance": loads.imbalance(),
        "counts": loads.counts.tolist(),
    }  # fmt: skip


def _memory(
    engine: InferenceEngine, speeds: list[Speed], cached: float
) -> dict[str, Any]:
    """Compare the memory traffic of each batch with the measured bandwidth."""
    from inl.backend.bandwidth import memory_bandwidth
    from inl.engine.benchmark import traffic
    from inl.plugin import make_backend
    from inl.runners.local_runner import LocalRunner

    # Tensors and memory of worker processes are not visible here.
    is_local = isinstance(engine.runner, LocalRunner)
    ceiling = memory_bandwidth(make_backend(engine.device)) if is_local else None
    moved = traffic(engine.runner) if isinstance(engine.runner, LocalRunner) else None
    rows = [_row(speed, moved and moved.step(speed.batch, cached)) for speed in speeds]
    for row in rows:
        rate = row["bytes_per_second"]
        share = rate / ceiling.bytes_per_second if rate and ceiling else None
        row["share_of_bandwidth"] = share
    return {"bandwidth": ceiling and ceiling._asdict(), "batches": rows}


def device_memory(engine: InferenceEngine) -> dict[str, int] | None:
    """Return total and free bytes of a device that is not the host's processor."""
    from inl.device import DeviceType
    from inl.plugin import make_backend
    from inl.runners.local_runner import LocalRunner

    if not isinstance(engine.runner, LocalRunner):
        return None  # the memory of worker processes is not visible here
    backend = make_backend(engine.device)
    if backend.device.type in (DeviceType.CPU, DeviceType.REFERENCE):
        return None
    return backend.memory()._asdict()


def _row(speed: Speed, step_bytes: float | None) -> dict[str, Any]:
    per_token = step_bytes and step_bytes / speed.batch
    decode = speed.decode
    return {
        "batch": speed.batch,
        "first_token_seconds": speed.first_token_seconds._asdict(),
        "prefill_tokens_per_second": speed.prefill._asdict(),
        "decode_tokens_per_second": decode and decode._asdict(),
        "bytes_per_token": per_token,
        "bytes_per_second": per_token and decode and per_token * decode.median,
    }


def peak_bytes() -> int | None:
    """Return the peak resident memory in bytes, or ``None`` if it is unknown."""
    try:
        resource: Any = import_module("resource")
    except ImportError:
        return None
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def bar(total: int, label: str = "measuring") -> Iterator[Callable[[], None]]:
    """Draw a progress bar on a terminal; yields a call that advances it by one."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
