"""Collectors of Prometheus metrics that its own classes do not have."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from inl.engine.encoder_load import EncoderLoad

PREFIX = "inl:"

ReadTotal = Callable[[], float | None]
"""Returns the value of a counter; ``None`` is not exported."""


ReadLayers = Callable[[], Sequence[float]]
"""Returns the value of each layer; none are not exported."""


ReadAdapters = Callable[[], tuple[int, Sequence[str]]]
"""Returns how many adapters a model has room for, and the names of those it has."""


ReadEncoders = Callable[[], "Mapping[str, EncoderLoad]"]
"""Returns what the encoders of a model have computed, by kind."""


class Samples:
    """Values of one histogram. Not thread-safe, and so a tenth of the usual cost."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        """Values of each bucket, the last one above all bounds."""
        self.sum = 0.0
        self._bounds = bounds

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value ``count`` times."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class EventHistograms(Collector):
    """A histogram of several models, whose values the event loop adds."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = PREFIX + name, text
        self._bounds = bounds
        self._samples: list[tuple[dict[str, str], Samples]] = []

    def of(self, labels: dict[str, str]) -> Samples:
        """Return the values of a model."""
        samples = Samples(self._bounds)
        self._samples.append((labels, samples))
        return samples

    def collect(self) -> Iterator[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        labels = list(self._samples[0][0]) if self._samples else []
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        for values, samples in self._samples:
            buckets = list(zip(names, accumulate(samples.counts), strict=True))
            family.add_metric(list(values.values()), buckets, samples.sum)
        yield family


class Totals(Collector):
    """Counters whose values are read when they are exported."""

    def __init__(self) -> None:
        self._reads: dict[str, list[tuple[dict[str, str], ReadTotal]]] = {}

    def add(self, name: str, labels: dict[str, str], read: ReadTotal) -> None:
        self._reads.setdefault(name, []).append((labels, read))

    def collect(self) -> Iterator[Metric]:
        for name, reads in self._reads.items():
            labels = list(reads[0][0])
            family = CounterMetricFamily(PREFIX + name, name, labels=labels)
            for values, read in reads:
                if (total := read()) is not None:
                    family.add_metric(list(values.values()), total)
            yield family


class LayerGauges(Collector):
    """A gauge with a value for each layer of a model, read when it is exported."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = PREFIX + name, text
        self._reads: list[tuple[dict[str, str], ReadLayers]] = []

    def add(self, labels: dict[str, str], read: ReadLayers) -> None:
        self._reads.append((labels, read))

    def collect(self) -> Iterator[Metric]:
        labels = [*self._reads[0][0], "layer"] if self._reads else []
        family = GaugeMetricFamily(self._name, self._text, labels=labels)
        for given, read in self._reads:
            for layer, value in enumerate(read()):
                family.add_metric([*given.values(), str(layer)], value)
        yield family


class AdapterInfo(Collector):
    """The adapters of models that have room for some, and when they were read.

    Labels are those that routers which know vLLM read: how many a model has room for,
    those that it has, and those that requests wait for, of which there are none.
    """

    def __init__(self) -> None:
        self._reads: list[tuple[dict[str, str], ReadAdapters]] = []

    def add(self, labels: dict[str, str], read: ReadAdapters) -> None:
        self._reads.append((labels, read))

    def collect(self) -> Iterator[Metric]:
        found = [(labels, read()) for labels, read in self._reads]
        if not any(room for _, (room, _) in found):
            return
        names = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
        family = GaugeMetricFamily(
            f"{PREFIX}lora_requests_info", "Adapters; the value is a time.",
            labels=[*found[0][0], *names],
        )  # fmt: skip
        for labels, (room, adapters) in found:
            if room:
                values = [*labels.values(), str(room), ",".join(adapters), ""]
                family.add_metric(values, time.time())
        yield family


class EncoderInfo(Collector):
    """Devices of the encoders of images and texts, and what waits for them."""

    def __init__(self) -> None:
        self._reads: list[tuple[dict[str, str], ReadEncoders]] = []

    def add(self, labels: dict[str, str], read: ReadEncoders) -> None:
        self._reads.append((labels, read))

    def collect(self) -> Iterator[Metric]:
        found = [(labels, read()) for labels, read in self._reads]
        if not any(loads for _, loads in found):
            return
        family = GaugeMetricFamily(
            f"{PREFIX}encoder_waiting", "Images or texts that wait for a program.",
            labels=[*found[0][0], "kind", "device"],
        )  # fmt: skip
        for labels, loads in found:
            for kind, load in loads.items():
                family.add_metric([*labels.values(), kind, load.device], load.waiting())
        yield family


class Renamed(Collector):
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
