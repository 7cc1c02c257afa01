"""Placement of a model on devices, by the memory that each part takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from inl.errors import RequestError

GB = 10**9
USABLE = 0.9
"""Share of a device's memory that is planned with; the rest is for programs."""
GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 12
"""Per parameter in mixed precision: bfloat16 gradients; a float32 copy and Adam's two
moments."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """A placement: ``tensor * pipeline * data`` devices, and bytes on the fullest."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    budget_bytes: int
    fits: bool
    reasons: tuple[str, ...]
    """Why this placement, in sentences."""

    @property
    def total_bytes(self) -> int:
        """Bytes on the fullest device."""
        return (
            self.weight_bytes + self.kv_bytes + self.activation_bytes
            + self.gradient_bytes + self.optimizer_bytes
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """What the planner knows about a model."""

    params: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    guessed: bool
    """Whether all but ``params`` was guessed from it."""


def get_optimal_parallelism(
    *,
    model_size_params: int,
    num_devices: int,
    memory_per_device_gb: float,
    training: bool = False,
    batch: int = 1,
    context: int = 2048,
    bytes_per_param: float = 2,
    kv_bytes_per_value: float = 2,
    layers: int | None = None,
    hidden: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> Parallelism:
    """Choose tensor, pipeline and data parallelism for a decoder on equal devices.

    Prefers data parallelism, which needs the least communication, then tensor, then
    pipeline. Memory is in GB of 1e9 bytes. batch: sequences on each copy of the model.
    layers, hidden, kv_heads, head_dim: of the model; guessed from its size if absent,
    which is stated in the reasons. If nothing fits, the placement with the least memory
    per device is returned with ``fits=False``. Raises
    :class:`~inl.errors.RequestError` for numbers that are not positive.
    """
    given = {
        "model_size_params": model_size_params, "num_devices": num_devices,
        "memory_per_device_gb": memory_per_device_gb, "batch": batch,
        "context": context, "bytes_per_param": bytes_per_param,
        "kv_bytes_per_value": kv_bytes_per_value,
    }  # fmt: skip
    for name, value in given.items():
        if isinstance(value, bool) or not value > 0:
            raise RequestError(f"{name}: found {value!r}, accepted: a number above 0")
    shape = _shape(model_size_params, layers, hidden, kv_heads, head_dim)
    budget = int(memory_per_device_gb * GB * USABLE)
    tokens = batch * context
    plans = [
        _plan(
            shape, (t, p, num_devices // (t * p)), budget, training, tokens,
            bytes_per_param, kv_bytes_per_value,
        )
        for t, p in product(range(1, num_devices + 1), repeat=2)
        if num_devices % (t * p) == 0
        and shape.kv_heads % t == 0
        and shape.layers % p == 0
    ]  # fmt: skip
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        best = min(fitting, key=lambda p: (-p.data_parallel, p.pipeline_parallel))
    else:
        best = min(plans, key=lambda p: p.total_bytes)
    return _explained(best, plans, shape, num_devices)


def _shape(
    params: int,
    layers: int | None,
    hidden: int | None,
    kv_heads: int | None,
    head_dim: int | None,
) -> Shape:
    guessed = None in (layers, hidden, kv_heads, head_dim)
    if layers is None:
        # 12 * layers * hidden^2 parameters, with hidden = 64 * layers.
        layers = max(round((params / (12 * 64**2)) ** (1 / 3)), 1)
        layers += layers % 2
    hidden = hidden or max(round((params / (12 * layers)) ** 0.5 / 128), 1) * 128
    head_dim = head_dim or min(128, hidden)
    kv_heads = kv_heads or max(hidden // head_dim, 1)
    return Shape(params, layers, hidden, kv_heads, head_dim, guessed)


def _plan(
    shape: Shape,
    split: tuple[int, int, int],
    budget: int,
    training: bool,
    tokens: int,
    bytes_per_param: float,
    kv_bytes_per_value: float,
) -> Parallelism:
    tensor, pipeline, data = split
    params = -(-shape.params // (tensor * pipeline))
    cached = 2 * shape.kv_heads * shape.head_dim * shape.layers * tokens
    # Half-precision inputs of every product of a layer: about 16 rows of hidden width.
    row = 16 * 2 * shape.hidden
    # Inference computes a step of at most 4,096 tokens, one layer after the other.
    kept = row * tokens * shape.layers if training else row * min(tokens, 4096)
    parts = {
        "weight_bytes": int(params * bytes_per_param),
        "kv_bytes": 0 if training else int(cached * kv_bytes_per_value),
        "activation_bytes": kept,
    }
    parts["kv_bytes"] //= tensor * pipeline
    # A stage holds the activations of as many micro-batches as there are stages.
    parts["activation_bytes"] //= tensor
    parts["gradient_bytes"] = params * GRADIENT_BYTES if training else 0
    parts["optimizer_bytes"] = params * OPTIMIZER_BYTES if training else 0
    return Parallelism(
        tensor, pipeline, data, budget_bytes=budget,
        fits=sum(parts.values()) <= budget, reasons=(), **parts,
    )  # fmt: skip


def _explained(
    best: Parallelism, plans: list[Parallelism], shape: Shape, devices: int
) -> Parallelism:
    from dataclasses import replace

    reasons = [
        f"each device holds {best.total_bytes / GB:.2f} GB of "
        f"{best.budget_bytes / GB:.2f} GB ({USABLE:.0%} of its memory)"
    ]
    for plan in plans:
        simpler = plan.data_parallel > best.data_parallel
        if simpler and not plan.fits and plan.pipeline_parallel == 1:
            reasons.append(
                f"tensor parallel {plan.tensor_parallel} with {plan.data_parallel} "
                f"copies would need {plan.total_bytes / GB:.2f} GB per device"
            )
    if best.data_parallel == devices > 1:
        reasons.append("the whole model fits on one device: copies need no exchange")
    refused = [t for t in range(2, devices + 1) if shape.kv_heads % t]
    if refused:
        listed = ", ".join(map(str, refused))
        reasons.append(
            f"tensor parallel {listed}: not a divisor of {shape.kv_heads} "
            "key-value heads"
        )
    if shape.guessed:
        reasons.append(
            f"guessed from the size: {shape.layers} layers of {shape.hidden}, "
            f"{shape.kv_heads} key-value heads of {shape.head_dim}"
        )
    if not best.fits:
        reasons.append("nothing fits: this placement takes the least memory")
    return replace(best, reasons=tuple(reasons))
