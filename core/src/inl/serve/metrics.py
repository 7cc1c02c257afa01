"""Prometheus metrics, under this project's names and vLLM's."""

from __future__ import annotations

import time
from collections import Counter as CountOf
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as text_of
from prometheus_client.metrics import MetricWrapperBase

from inl.serve.collectors import (
    PREFIX,
    AdapterInfo,
    EncoderInfo,
    EventHistograms,
    LayerGauges,
    ReadTotal,
    Renamed,
    Totals,
)
from inl.serve.job import Phases

if TYPE_CHECKING:
    from inl.engine.encoder_load import EncoderLoad
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.records import StepRecord
    from inl.serve.admission import Admission
    from inl.serve.generations import Generation

LATENCIES = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0
)  # fmt: skip

STEP_TOKENS = tuple(float(2**power) for power in range(14))

MOST_ADMITTED = 1 << 16
"""Requests whose first step is remembered; far more than can be open."""

M = TypeVar("M", Counter, Gauge, Histogram)


class Metrics:
    """Metrics of one server, labelled by model."""

    def __init__(self, *, vllm_names: bool) -> None:
        self.registry = CollectorRegistry()
        self._source = CollectorRegistry()
        prefixes = (PREFIX, "vllm:") if vllm_names else (PREFIX,)
        self.registry.register(Renamed(self._source, prefixes))
        self._families: dict[str, MetricWrapperBase] = {}
        self._totals = Totals()
        self._source.register(self._totals)
        self.inter_token = EventHistograms(
            "inter_token_latency_seconds", "Time between the tokens of a request.",
            LATENCIES,
        )  # fmt: skip
        self._source.register(self.inter_token)
        self.expert_loads = LayerGauges(
            "expert_load_imbalance",
            "Most tokens of an expert or device of a layer, relative to their mean.",
        )
        self._source.register(self.expert_loads)
        self.adapters = AdapterInfo()
        self._source.register(self.adapters)
        self.encoders = EncoderInfo()
        self._source.register(self.encoders)

    def of(self, model: str) -> ModelMetrics:
        """Return the metrics of a model."""
        return ModelMetrics(self, {"model_name": model, "engine": "0"})

    def text(self) -> bytes:
        """Return the exposition format of Prometheus."""
        return text_of(self.registry)

    def family(
        self, kind: type[M], name: str, text: str, labels: list[str], **options: Any
    ) -> M:
        """Return the metric of all models with a name."""
        if name not in self._families:
            self._families[name] = kind(
                PREFIX + name, text, labels, registry=self._source, **options
            )
        found = self._families[name]
        assert isinstance(found, kind), "one kind for each name"
        return found

    def total(self, name: str, labels: dict[str, str], read: ReadTotal) -> None:
        """Export a counter whose value is read when it is exported."""
        self._totals.add(name, labels, read)


class ModelMetrics:
    """Counters and histograms of one model.

    Steps are recorded on the thread that steps the engine, all else by the event loop.
    """

    def __init__(self, metrics: Metrics, labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels
        self._admitted: dict[int, float] = {}
        """Time of the first step of each open request by its id."""
        self._last_token: dict[int, float] = {}
        self._info: tuple[Any, ...] | None = None
        """Label values of ``cache_config_info``."""
        self._positions = 0
        """Positions of drafts that are exported."""
        self._engine: Callable[[], InferenceEngine | None] = lambda: None
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from the call to the first token."
        )
        self.inter_token = metrics.inter_token.of(labels)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Decoding time per token."
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "Time from the call to the end."
        )
        self.phases = {
            name: self._histogram(f"request_{name}_time_seconds", f"{name} time.")
            for name in ("queue", "prefill", "decode", "inference")
        }
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step.", STEP_TOKENS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.hits = self._counter(
            "prefix_cache_hits", "Prompt tokens that the prefix cache had."
        )
        self.queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.success = metrics.family(
            Counter, "request_success", "Finished requests.",
            [*labels, "finished_reason"],
        )  # fmt: skip

    def observe(
        self, admission: Admission, engine: Callable[[], InferenceEngine | None]
    ) -> None:
        """Read the gauges from an admission, and from an engine while it is loaded."""

        def read(value: Callable[[InferenceEngine], float]) -> Callable[[], float]:
            return lambda: 0 if (loaded := engine()) is None else value(loaded)

        self._engine = engine
        running = read(lambda loaded: loaded.core.running_requests)
        self._gauge("num_requests_running", "Requests with a slot.", running)
        self._gauge(
            "num_requests_waiting", "Requests that wait for a slot.",
            lambda: max(admission.open - running(), 0),
        )  # fmt: skip
        self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache blocks in use, 0 to 1.",
            read(lambda loaded: loaded.core.kv_usage),
        )  # fmt: skip
        self._gauge(
            "model_loaded", "1 while the model is loaded.", read(lambda _: 1)
        )  # fmt: skip
        total = self._metrics.total
        failed = read(lambda loaded: loaded.core.failed_steps)
        total("failed_steps", self._labels, failed)
        preemptions = read(lambda loaded: loaded.stats.preemptions)
        total("num_preemptions", self._labels, preemptions)
        for name, exported in SPECULATED.items():
            total(exported, self._labels, partial(self._speculated, name))
        for name in TIERS:
            labels = {**self._labels, "tier": name}
            total("kv_tier_hit_blocks", labels, partial(self._tier_hits, name))
        for kind in RECORDS:
            labels = {**self._labels, "kind": kind}
            total("kv_disk_records", labels, partial(self._records, kind))
        for kind in SNAPSHOTS:
            labels = {**self._labels, "kind": kind}
            total("state_snapshots", labels, partial(self._snapshots, kind))
        self._gauge(
            "state_snapshot_bytes", "Host memory of snapshots of recurrent state.",
            read(lambda loaded: loaded.snapshots.used_bytes if loaded.snapshots else 0),
        )  # fmt: skip
        for kind in TICKETS:
            labels = {**self._labels, "kind": kind}
            total("remote_prefill", labels, partial(self._tickets, kind))
        for kind in SHARED:
            labels = {**self._labels, "kind": kind}
            total("kv_store_blocks", labels, partial(self._shared, kind))
        total("requests_rejected", self._labels, lambda: admission.rejected)
        for parts in ("experts", "devices"):
            self._metrics.expert_loads.add(
                {**self._labels, "of": parts}, partial(self._imbalance, parts)
            )
        self._metrics.adapters.add(self._labels, self._adapters)
        self._metrics.encoders.add(self._labels, self._encoders)
        for kind in ENCODERS:
            labels = {**self._labels, "kind": kind}
            for name in ENCODED:
                reads = partial(self._encoded, kind, name)
                total(f"encoder_{name}", labels, reads)
        counted = read(lambda loaded: loaded.core.expert_loads.steps)
        total("expert_load_steps", self._labels, counted)

    def _adapters(self) -> tuple[int, Sequence[str]]:
        """Return for how many adapters there is room, and their names."""
        engine = self._engine()
        if engine is None:
            return 0, ()
        return engine.runner.limits.adapters, engine.adapters

    def _encoders(self) -> Mapping[str, EncoderLoad]:
        engine = self._engine()
        return {} if engine is None else engine.encoder_load

    def _encoded(self, kind: str, name: str) -> float | None:
        """Return a total of an encoder; ``None`` without one of the kind."""
        load = self._encoders().get(kind)
        return None if load is None else float(getattr(load, name))

    def _imbalance(self, parts: str) -> Sequence[float]:
        """Return the imbalance of the counted tokens, of each layer with experts."""
        if (engine := self._engine()) is None or not engine.core.expert_loads.steps:
            return ()
        if parts == "experts":
            return engine.core.expert_loads.imbalance()
        return engine.core.expert_loads.device_imbalance(engine.config)

    def record_load(self, engine: InferenceEngine) -> None:
        """Export the settings of the KV cache of an engine that was loaded."""
        names = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
        info = self._metrics.family(
            Gauge, "cache_config_info", "Settings of the KV cache.",
            [*self._labels, *names],
        )  # fmt: skip
        limits, config = engine.runner.limits, engine.config
        values = (
            *self._labels.values(), limits.block_size, sum(limits.blocks),
            config.kv_dtype, config.prefix_cache,
        )  # fmt: skip
        if self._info is not None:
            info.remove(*self._info)
        info.labels(*values).set(1)
        self._info = values
        most = 0 if engine.speculation is None else engine.speculation.max_drafts
        for position in range(self._positions, most):
            self._metrics.total(
                ACCEPTED_AT, {**self._labels, "position": str(position)},
                partial(self._accepted_at, position),
            )  # fmt: skip
        self._positions = max(self._positions, most)

    def _speculated(self, name: str) -> float | None:
        """Return a count; ``None`` without speculation."""
        engine = self._engine()
        if engine is None or engine.speculation is None:
            return None
        return float(getattr(engine.speculation, name))

    def _accepted_at(self, position: int) -> float | None:
        engine = self._engine()
        if engine is None or engine.speculation is None:
            return None
        return float(engine.speculation.accepted_at[position])

    def _tier_hits(self, name: str) -> float | None:
        """Return the blocks that a tier had; ``None`` without tiers."""
        engine = self._engine()
        if engine is None or engine.tiers is None:
            return None
        return float(engine.tiers.hits[name])

    def _records(self, kind: str) -> float | None:
        engine = self._engine()
        if engine is None or engine.tiers is None or engine.tiers.disk is None:
            return None
        return float(engine.tiers.disk.counts[kind])

    def _snapshots(self, kind: str) -> float | None:
        """Return a count of snapshots of recurrent state; ``None`` without them."""
        engine = self._engine()
        if engine is None or engine.snapshots is None:
            return None
        return float(engine.snapshots.counts[kind])

    def _tickets(self, kind: str) -> float | None:
        """Return the prompts that other engines computed; ``None`` without them."""
        engine = self._engine()
        if engine is None or engine.remote_prefill is None:
            return None
        return float(engine.remote_prefill.counts[kind])

    def _shared(self, kind: str) -> float | None:
        """Return the blocks of a store of several engines; ``None`` without one."""
        engine = self._engine()
        if engine is None or engine.shared_blocks is None:
            return None
        return float(engine.shared_blocks.counts[kind])

    def record_step(self, record: StepRecord) -> None:
        """Record a submitted step."""
        self.step_tokens.observe(record.tokens)
        if record.rows > record.decode_rows:
            now = time.perf_counter()
            for number in record.requests:
                self._admitted.setdefault(number, now)
            # Steps in flight may record requests that have ended already.
            while len(self._admitted) > MOST_ADMITTED:
                self._admitted.pop(next(iter(self._admitted)), None)

    def record_tokens(
        self, numbers: Sequence[int], counts: Sequence[int], firsts: Sequence[float]
    ) -> None:
        """Record how many tokens some requests have generated, once for all.

        numbers: their ids. firsts: seconds until the first token, of those that had
        none before.
        """
        now = time.perf_counter()
        lasts = map(self._last_token.get, numbers)
        # Most requests of a step have had their last token at the same time.
        gaps = CountOf(zip(lasts, counts, strict=True))
        self._last_token.update(dict.fromkeys(numbers, now))
        self.generation_tokens.inc(sum(counts))
        for (last, count), times in gaps.items():
            if last is not None:
                self.inter_token.observe((now - last) / count, count * times)
        for seconds in firsts:
            self.first_token.observe(seconds)

    def record_end(self, item: Generation) -> None:
        """Record the end of a request, finished or not."""
        handle = item.handle
        number = handle.request.id
        count = len(handle.token_ids) - handle.resumed_tokens
        self._last_token.pop(number, None)
        admitted = self._admitted.pop(number, None)
        if handle.finish_reason is None or handle.error is not None:
            return
        self.success.labels(**self._labels, finished_reason=handle.finish_reason).inc()
        if handle.finish_reason == "cancelled" or admitted is None:
            return
        queued = max(admitted - item.submitted, 0.0)
        phases = Phases(queued, handle.first_token_seconds, handle.seconds)
        item.phases = phases
        if item.is_first:
            self.prompt_tokens.inc(handle.request.prompt_tokens)
        self.queries.inc(handle.request.prompt_tokens)
        self.hits.inc(handle.request.cached_tokens)
        self.end_to_end.observe(phases.total)
        for name, histogram in self.phases.items():
            histogram.observe(getattr(phases, name))
        if count > 1:
            self.per_token.observe(phases.decode / (count - 1))

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = LATENCIES
    ) -> Histogram:
        labels = list(self._labels)
        family = self._metrics.family(Histogram, name, text, labels, buckets=buckets)
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        family = self._metrics.family(Counter, name, text, list(self._labels))
        return family.labels(**self._labels)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        family = self._metrics.family(Gauge, name, text, list(self._labels))
        family.labels(**self._labels).set_function(read)


SPECULATED = {
    "rows": "spec_decode_num_drafts",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
"""Counts of the engine's speculation, and their names."""

TIERS = ("host", "disk")
"""Tiers of blocks below the device's."""

RECORDS = ("written", "missing", "damaged", "foreign", "stale")
"""Records of blocks in files: what became of them."""

ENCODERS = ("images", "texts")
"""Kinds of what encoders compute."""

ENCODED = ("programs", "inputs", "cache_hits", "seconds")
"""Totals of an encoder."""

SNAPSHOTS = ("taken", "restored", "dropped")
"""Snapshots of recurrent state: what became of them."""

SHARED = (
    "read",
    "written",
    "full",
    "damaged",
    "foreign",
    "stale",
    "failed",
    "expired",
    "dropped",
)
"""Blocks of a store that engines share: what became of them."""

TICKETS = (
    "done",
    "refused",
    "expired",
    "failed",
    "stale",
    "foreign",
    "damaged",
    "full",
)
"""Prompts that other engines were asked for: what became of them."""

ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos"
