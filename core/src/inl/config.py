"""How an engine is to run; every field has a default that works."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.spec.step import SAMPLERS

if TYPE_CHECKING:
    from pathlib import Path

    from inl.device import Device


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine runs on and how much it takes.

    Raises :class:`~inl.errors.RequestError` for a value out of range.
    """

    backend: str | Device = "auto"
    """Device such as "cpu" or "cuda:1"; "auto" takes the best that is there, and
    "worker:PATH_TO_PYTHON/cuda:1" one that another interpreter serves."""
    tensor_parallel: int = 1
    """Devices that share the model, a process on each: the named one and those after
    it, which must divide the model's key-value heads."""
    dtype: str = "auto"
    """Dtype to compute in; "auto" is the backend's preference."""
    kv_dtype: str = "auto"
    """Dtype of cached keys and values; "auto" is the one computed in. "int8", with a
    scale for each token and head, takes half the memory of bfloat16."""
    use_kv_cache: bool = True
    """``False`` computes the whole sequence again for each token."""
    prefix_cache: bool = True
    """Share cached blocks between prompts that begin alike."""
    max_batch: int = 8
    """Sequences computed at once."""
    token_budget: int | None = None
    """Most tokens in one step; longer prompts are cut into chunks. ``None`` is what the
    backend likes best: more of them read prompts faster, take more memory, and let rows
    that decode beside them wait longer."""
    context: int | None = None
    """Most tokens of a prompt and its answer; ``None`` is what the model allows."""
    cache_bytes: int | None = None
    """Memory for keys and values; ``None`` is a quarter of what is free."""
    depth: int | None = None
    """Steps in flight; ``None`` is the backend's preference."""
    sampling: str = "sample_filtered"
    """Costliest way to choose tokens that is served: "greedy", "sample" (temperatures)
    or "sample_filtered" (filters, penalties, biases, logprobs), which holds 8 bytes for each token
    of the vocabulary and sequence of the batch."""
    invariant: bool = False
    """Only kernels whose bits do not depend on the rest of the batch."""
    warm_up: bool = False
    """Make every program before the engine begins, as a server should; otherwise each
    is made when a step first needs it, so that one short answer waits for two or
    three of them."""
    allow_hosted: bool = False
    """Compute ops that have no kernel in NumPy on the host."""
    velocity: str | None = None
    """Of an INL model: "reset" lets each token begin at rest, "carry" lets those of an
    answer go on from the one before; ``None`` is what the model's config says."""
    on_worker_loss: str = "raise"
    """"restart" starts a fresh worker, rebuilds every sequence and goes on."""
    restart_device: str | Device | None = None
    """Where the fresh worker runs; ``None`` is where the lost one ran."""
    worker_seconds: float = 600.0
    """How long a worker may be silent, loading or computing, before it counts as
    lost; ``math.inf`` waits for ever."""
    trace: str | Path | None = None
    """File for all that the runner is told and answers, for ``inl replay``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                self._check(field.name, type(value) is bool, "True or False")
        for name in ("max_batch", "tensor_parallel"):
            value = getattr(self, name)
            self._check(name, _counts(value), "a whole number of 1 or more")
        for name in ("token_budget", "context", "cache_bytes", "depth"):
            value = getattr(self, name)
            known = value is None or _counts(value)
            self._check(name, known, "None or a whole number of 1 or more")
        seconds = _seconds(self.worker_seconds)
        self._check("worker_seconds", seconds, "a number of seconds above 0")
        for name in ("dtype", "kv_dtype"):
            given = isinstance(getattr(self, name), str)
            self._check(name, given, "the name of a dtype")
        self._check("sampling", self.sampling in SAMPLERS, " or ".join(SAMPLERS))
        known = self.velocity in (None, "reset", "carry")
        self._check("velocity", known, "None, reset or carry")
        losses = ("raise", "restart")
        self._check(
            "on_worker_loss", self.on_worker_loss in losses, " or ".join(losses)
        )

    def _check(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise RequestError(
                f"EngineConfig.{name}: found {getattr(self, name)!r}, "
                f"accepted: {accepted}"
            )


def _seconds(value: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value > 0


def _counts(value: object) -> bool:
    return type(value) is int and 1 <= value < 2**62
