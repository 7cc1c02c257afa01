"""Prometheus metrics of a fleet."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from inl.fleet.engine_link import State
from inl.serve.metrics import Metrics

if TYPE_CHECKING:
    from inl.fleet.client import FleetClient

COUNTS = (
    "lost",
    "refused",
    "continued",
    "resumed",
    "diverged",
    "failed",
    "prefix_gaps",
    "exported",
)
"""Totals of the client."""

TOKENS = {
    "prompt_tokens": "fleet_prompt_tokens",
    "cached_tokens": "fleet_cached_tokens",
    "predicted_tokens": "fleet_predicted_cached_tokens",
}
"""Totals of the router, and their names."""

LABELS = {"engine": "0"}
NAMES = list(LABELS)


class FleetMetrics:
    """Metrics of one front-end, read when they are exported."""

    def __init__(self, client: FleetClient, *, vllm_names: bool) -> None:
        self._metrics = metrics = Metrics(vllm_names=vllm_names)
        for name in COUNTS:
            metrics.total(f"fleet_{name}", LABELS, partial(_count, client, name))
        for name, exported in TOKENS.items():
            metrics.total(exported, LABELS, partial(getattr, client.router, name))
        admission = client.admission
        metrics.total("requests_rejected", LABELS, lambda: admission.rejected)
        self._gauge(
            "num_requests_running", "Requests that engines have places for.",
            lambda: admission.open - admission.waiting,
        )  # fmt: skip
        self._gauge(
            "num_requests_waiting", "Requests that wait for a place.",
            lambda: admission.waiting,
        )  # fmt: skip
        self._gauge(
            "queued_tokens", "Prompt tokens that wait.",
            lambda: admission.queued_tokens,
        )  # fmt: skip
        engines = metrics.family(
            Gauge, "fleet_engines", "Engines by what they can do.", ["state"]
        )
        for state in State:
            engines.labels(state=state.value).set_function(
                partial(_number_of, client, state)
            )
        self._open = metrics.family(
            Gauge, "fleet_open_requests", "Open requests of an engine.", ["address"]
        )
        self._seconds = metrics.family(
            Gauge, "fleet_seconds_per_token",
            "Measured time to the first token by prompt tokens to compute.",
            ["address"],
        )  # fmt: skip
        self._slowness = metrics.family(
            Gauge, "fleet_slowness",
            "90th percentile of an engine by the usual one, if it is slow, else 1.",
            ["address"],
        )  # fmt: skip
        self._clock = metrics.family(
            Gauge, "fleet_clock_seconds",
            "Time of day of an engine when it connected, less that of the front-end.",
            ["address"],
        )  # fmt: skip
        self._client = client

    def _gauge(self, name: str, text: str, read: object) -> None:
        family = self._metrics.family(Gauge, name, text, NAMES)
        family.labels(**LABELS).set_function(read)  # type: ignore[arg-type]

    def text(self) -> bytes:
        """Return the exposition format of Prometheus."""
        for load in self._client.members.engine_loads():
            address = load["address"]
            self._open.labels(address=address).set(load["open"])
            self._seconds.labels(address=address).set(load["seconds_per_token"])
            self._slowness.labels(address=address).set(load["slowness"])
            self._clock.labels(address=address).set(load["clock_seconds"])
        return self._metrics.text()


def _count(client: FleetClient, name: str) -> float:
    return client.counts[name]


def _number_of(client: FleetClient, state: State) -> float:
    return sum(each.state is state for each in client.engines)
