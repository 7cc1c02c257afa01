"""Least times of a model over several devices, from rates that are measured here.

A step takes at least as long as its devices read the weights and the cache it needs, or
multiply, whichever is longer, and as the exchanges between them that no kernel hides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import multiprocessing

from inl.backend.collectives import TENSOR, Rank
from inl.backend.rank_sockets import reserve_address
from inl.placement.placement import Placement, parse_placement

EXCHANGED_ROWS = (1, 8, 64, 256, 512, 2048, 8192)
BYTES = 2
"""Of a bfloat16."""
CHAIN = 16
"""Exchanges that are timed together."""


class Shape(NamedTuple):
    """Sizes of a model; experts: their number and that of a token, 0 if dense."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: tuple[int, int] = (0, 0)

    @property
    def attention(self) -> int:
        """Weights of the attention of all layers."""
        heads = 2 * self.heads + 2 * self.kv_heads
        return self.layers * self.hidden * heads * self.head_dim

    @property
    def expert(self) -> int:
        """Weights of one expert, or of the feed-forward block, of all layers."""
        return 3 * self.layers * self.hidden * self.inner

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    def bytes_per_device(self, placement: Placement) -> int:
        """Bytes of the weights on the fullest device."""
        experts = max(self.experts[0], 1) * self.expert
        if self.experts[0]:
            experts //= placement.data * placement.expert
        layers = (self.attention + experts) // placement.pipeline
        ends = self.head if placement.pipeline > 1 else 2 * self.head
        return BYTES * (layers + ends) // placement.tensor

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of some tokens."""
        return 2 * BYTES * tokens * self.layers * self.kv_heads * self.head_dim


@dataclass
class Rates:
    """What the machine does: bytes and operations a second, exchanges in us."""

    copy: float
    multiply: float
    exchanges: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Number of devices -> verb -> microseconds for each of EXCHANGED_ROWS rows, or the
    first of them."""

    def exchange(self, devices: int, verb: str, rows: float) -> float:
        """Seconds of an exchange of ``rows`` rows; 0 on one device."""
        if devices == 1:
            return 0.0
        known = self.exchanges[str(devices)][verb]
        return 1e-6 * float(np.interp(rows, EXCHANGED_ROWS[: len(known)], known))


@dataclass(frozen=True)
class Limits:
    """Least times of one placement of a model."""

    shape: Shape
    placement: Placement
    rates: Rates

    def step(self, rows: int, length: int) -> float:
        """Seconds between two tokens of each of some sequences of that length.

        Stages of a pipeline compute lanes of the rows, each of which passes all stages.
        """
        s, p = self.shape, self.placement
        lane = rows / min(p.pipeline, rows)
        own = lane / min(p.data, lane)
        read = (s.attention + s.head) * BYTES + own * s.cache_bytes(length)
        number, chosen = s.experts
        used, owners = 1.0, 1
        if number:
            used, owners = number * (1 - (1 - chosen / number) ** lane), p.data
        read += used * s.expert * BYTES / (p.expert * owners)
        read /= p.tensor
        return max(read / self.rates.copy, self._multiplying(own, lane)) + (
            self._exchanging(lane)
        )

    def prompt(self, tokens: int, budget: int) -> float:
        """Seconds of one prompt, in steps of at most ``budget`` tokens."""
        s, p = self.shape, self.placement
        scores = 2 * tokens**2 * s.heads * s.head_dim * s.layers
        flops = self._multiplying(tokens, tokens, heads=1)
        flops += scores / p.tensor / self.rates.multiply
        steps = max(tokens / budget, 1)
        return flops / p.pipeline + steps * self._exchanging(min(tokens, budget))

    def requests(self, count: int, prompt: int, answer: int, budget: int) -> float:
        """Seconds for many requests at once."""
        own = count * prompt / self.placement.data
        computed = self._multiplying(own, count * prompt, heads=count)
        steps = count * prompt / (budget * self.placement.data)
        exchanged = steps * self._exchanging(budget * self.placement.data)
        decoding = (answer - 1) * self.step(count, prompt + answer // 2)
        return computed / self.placement.pipeline + exchanged + decoding

    def sums(self, rows: int) -> float:
        """Seconds of :meth:`step` in exchanges between devices."""
        return self._exchanging(rows / min(self.placement.pipeline, rows))

    def _multiplying(
        self, own: float, rows: float, heads: float | None = None
    ) -> float:
        """Seconds of the products of a device's own rows, and of all rows' experts."""
        s, p = self.shape, self.placement
        heads = own if heads is None else heads
        products = own * s.attention + heads * s.head
        if s.experts[0]:
            products += rows * s.experts[1] * s.expert / (p.expert * p.data)
        else:
            products += own * s.expert
        return 2 * products / p.tensor / self.rates.multiply

    def _exchanging(self, rows: float) -> float:
        s, p, rates = self.shape, self.placement, self.rates
        sums = (2 * s.layers + 1) * rates.exchange(p.tensor, "all_reduce", rows)
        if s.experts[0]:
            sums += s.layers * rates.exchange(p.expert, "all_reduce", rows)
            for verb in ("gather_rows", "reduce_scatter"):
                sums += s.layers * rates.exchange(p.data, verb, rows)
        hops = p.pipeline - 1
        return sums + hops * rates.exchange(p.pipeline, "send", rows)


def measured(device: str, shape: Shape, placements: Sequence[str]) -> Rates:
    """Measure the first device, and exchanges between as many as placements need."""
    kind = device.partition(":")[0]
    place = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    rates = Rates(_copy_rate(place), _multiply_rate(place))
    sizes = {size for each in placements for _, size in parse_placement_axes(each)}
    for size in sorted(sizes):
        rates.exchanges[str(size)] = _exchanges(kind, size, shape)
    if kind == "cuda":
        torch.cuda.empty_cache()
    return rates


def parse_placement_axes(text: str) -> tuple[tuple[str, int], ...]:
    """Return the axes of a placement's text; none for "one"."""
    return () if text == "one" else parse_placement(text).axes


def _seconds(call: Callable[[], Any], place: torch.device, count: int) -> float:
    """Median seconds of a call, by the clock of the host around ``count`` of them."""
    call()
    found = []
    for _ in range(5):
        _synchronize(place)
        began = time.perf_counter()
        for _ in range(count):
            call()
        _synchronize(place)
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _copy_rate(place: torch.device) -> float:
    source = torch.randn(1 << (30 if place.type == "cuda" else 24), device=place)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), place, 5)


def _multiply_rate(place: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if place.type == "cuda" else (1024, None)
    x, y = torch.randn((2, size, size), device=place, dtype=dtype).unbind()
    return 2 * size**3 / _seconds(lambda: x @ y, place, 5)


def _exchanges(kind: str, ranks: int, shape: Shape) -> dict[str, list[float]]:
    address, reserved = reserve_address()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with reserved:
        multiprocessing.spawn(
            _exchange, (ranks, address, kind, shape, answers), nprocs=ranks
        )
    found: dict[str, list[float]] = answers.get()
    return found


def _exchange(
    number: int, ranks: int, address: str, kind: str, shape: Shape, answers: Any
) -> None:
    """Time the exchanges of one rank; the first one answers."""
    from inl_torch.collectives import ProcessCollectives

    torch.set_num_threads(1)
    place = torch.device("cuda", number) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    group = ProcessCollectives(Rank(number, ranks, address, 120.0), place)
    found: dict[str, list[float]] = {}
    for rows in EXCHANGED_ROWS if kind == "cuda" else EXCHANGED_ROWS[:3]:
        x = torch.zeros((rows, shape.hidden), dtype=torch.bfloat16, device=place)
        part = x[: -(-rows // ranks)]
        chosen = max(shape.experts[1], 1)
        ids = torch.zeros((len(part), chosen), dtype=torch.int32, device=place)
        routed = part, ids, ids.float()
        whole = x.new_zeros((len(part) * ranks, shape.hidden))
        calls = {
            "all_reduce": lambda x=x: group.all_reduce(x, TENSOR),
            "gather_rows": lambda x=routed: group.gather_rows(x, TENSOR),
            "reduce_scatter": lambda x=whole: group.reduce_scatter(x, TENSOR),
        }
        for verb, call in calls.items():
            timed = _captured(call, place)
            found.setdefault(verb, []).append(1e6 * _seconds(timed, place, 4) / CHAIN)
        spent = _seconds(lambda x=x: _turn(group, x, number), place, CHAIN)
        found.setdefault("send", []).append(1e6 * spent / 2)
        group.barrier(TENSOR)
    if number == 0:
        answers.put(found)


def _captured(call: Callable[[], Any], place: torch.device) -> Callable[[], Any]:
    """Return a function that runs a call CHAIN times, in a graph on a GPU."""

    def repeated() -> None:
        for _ in range(CHAIN):
            call()

    if place.type != "cuda":
        return repeated
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        repeated()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated()
    return graph.replay


def _turn(group: Any, x: torch.Tensor, number: int) -> None:
    """Send rows from the first rank to the second one and back."""
    from inl.spec.op import Spec

    spec = Spec(tuple(x.shape), "bfloat16")
    if number == 0:
        group.send(x, TENSOR, 1)
        group.recv(spec, TENSOR, 1)
    elif number == 1:
        group.recv(spec, TENSOR, 0)
        group.send(x, TENSOR, 0)
