"""Prometheus metrics, under this project's names and vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as text_of
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from inl.engine.core import StepRecord
    from inl.engine.inference_engine import InferenceEngine
    from inl.serve.admission import Admission
    from inl.serve.generations import Generation
    from inl.serve.job import Delta

LATENCIES = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0
)  # fmt: skip

STEP_TOKENS = tuple(float(2**power) for power in range(14))

PREFIX = "inl:"


class Metrics:
    """Counters and histograms of one server.

    Steps are recorded on the thread that steps the engine, all else by the event loop.
    """

    def __init__(self, model: str, *, vllm_names: bool) -> None:
        self.registry = CollectorRegistry()
        self._source = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        prefixes = (PREFIX, "vllm:") if vllm_names else (PREFIX,)
        self.registry.register(_Renamed(self._source, prefixes))
        self._admitted: dict[int, float] = {}
        """Time of the first step of each open request by its id."""
        self._last_token: dict[int, float] = {}
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from the call to the first token."
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between the tokens of a request."
        )
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
        self.success = Counter(
            PREFIX + "request_success", "Finished requests.",
            [*self._labels, "finished_reason"], registry=self._source,
        )  # fmt: skip

    def observe_engine(self, engine: InferenceEngine, admission: Admission) -> None:
        """Read the gauges from an engine and its admission."""
        scheduler, labels = engine.core.scheduler, self._labels
        self._gauge(
            "num_requests_running", "Requests with a slot.",
            lambda: len(scheduler.running),
        )  # fmt: skip
        self._gauge(
            "num_requests_waiting", "Requests that wait for a slot.",
            lambda: max(admission.open - len(scheduler.running), 0),
        )  # fmt: skip
        self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache blocks in use, 0 to 1.",
            lambda: kv_usage(engine),
        )  # fmt: skip
        cache = engine.config
        info = Gauge(
            PREFIX + "cache_config_info", "Settings of the KV cache.",
            [*labels, "block_size", "num_gpu_blocks", "cache_dtype",
             "enable_prefix_caching"],
            registry=self._source,
        )  # fmt: skip
        limits = engine.runner.limits
        info.labels(
            **labels,
            block_size=limits.block_size,
            num_gpu_blocks=sum(limits.blocks),
            cache_dtype=cache.kv_dtype,
            enable_prefix_caching=cache.prefix_cache,
        ).set(1)
        self._source.register(
            _Totals(
                {
                    "num_preemptions": lambda: scheduler.preemptions,
                    "requests_rejected": lambda: admission.rejected,
                },
                labels,
            )
        )

    def text(self) -> bytes:
        """Return the exposition format of Prometheus."""
        return text_of(self.registry)

    def record_step(self, record: StepRecord) -> None:
        """Record a submitted step."""
        self.step_tokens.observe(record.tokens)
        if record.rows > record.decode_rows:
            now = time.perf_counter()
            for number in record.requests:
                self._admitted.setdefault(number, now)

    def record_delta(self, item: Generation, delta: Delta) -> None:
        """Record tokens that were generated."""
        if not delta.token_ids:
            return
        now, count = time.perf_counter(), len(delta.token_ids)
        number = item.handle.request.id
        last = self._last_token.get(number)
        self._last_token[number] = now
        self.generation_tokens.inc(count)
        if last is None:
            self.first_token.observe(item.handle.first_token_seconds)
            return
        for _ in range(count):
            self.inter_token.observe((now - last) / count)

    def record_end(self, item: Generation) -> None:
        """Record the end of a request, finished or not."""
        handle = item.handle
        number, count = handle.request.id, len(handle.token_ids)
        self._last_token.pop(number, None)
        admitted = self._admitted.pop(number, None)
        if handle.finish_reason is None or handle.error is not None:
            return
        self.success.labels(**self._labels, finished_reason=handle.finish_reason).inc()
        if handle.finish_reason == "cancelled" or admitted is None:
            return
        first, total = handle.first_token_seconds, handle.seconds
        queued = max(admitted - item.submitted, 0.0)
        self.prompt_tokens.inc(handle.request.prompt_tokens)
        self.queries.inc(handle.request.prompt_tokens)
        self.hits.inc(handle.request.cached_tokens)
        self.end_to_end.observe(total)
        self.phases["queue"].observe(queued)
        self.phases["prefill"].observe(max(first - queued, 0.0))
        self.phases["decode"].observe(total - first)
        self.phases["inference"].observe(max(total - queued, 0.0))
        if count > 1:
            self.per_token.observe((total - first) / (count - 1))

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = LATENCIES
    ) -> Histogram:
        return Histogram(
            PREFIX + name, text, list(self._labels), registry=self._source,
            buckets=buckets,
        ).labels(**self._labels)  # fmt: skip

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(
            PREFIX + name, text, list(self._labels), registry=self._source
        )
        return counter.labels(**self._labels)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(PREFIX + name, text, list(self._labels), registry=self._source)
        gauge.labels(**self._labels).set_function(read)


def kv_usage(engine: InferenceEngine) -> float:
    """Return the share of KV cache blocks in use, 0 to 1."""
    pools = engine.core.scheduler.kv_cache.pools
    return max(pool.used_blocks / max(pool.blocks - 1, 1) for pool in pools)


class _Totals(Collector):
    """Counters whose values are read when they are exported."""

    def __init__(
        self, reads: dict[str, Callable[[], int]], labels: dict[str, str]
    ) -> None:
        self._reads = reads
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for name, read in self._reads.items():
            family = CounterMetricFamily(PREFIX + name, name, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), read())
            yield family


class _Renamed(Collector):
    """The metrics of a registry under several prefixes."""

    def __init__(self, source: CollectorRegistry, prefixes: tuple[str, ...]) -> None:
        self._source = source
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        for prefix in self._prefixes:
            for metric in self._source.collect():
                name = metric.name.replace(PREFIX, prefix, 1)
                copy = Metric(name, metric.documentation, metric.type)
                copy.samples = [
                    sample._replace(name=sample.name.replace(PREFIX, prefix, 1))
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield copy
