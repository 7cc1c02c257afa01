"""Placement of a model on devices, by the memory that each part takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from inl.errors import RequestError
from inl.placement.placement import Placement

GB = 10**9
USABLE = 0.9
"""Share of a device's memory that is planned with; the rest is for programs."""
MOST_TRIED = 64
"""Sizes of tensor parallelism up to this one are named in the reasons."""
STEP_TOKENS = 4096
"""Tokens of the largest step of inference, by default."""
POSITIVE = "a number above 0"
MOST = 10**18
"""Largest number that is accepted, of parameters for example."""
DIVIDED = ("layers", "kv_heads")
MOST_DIVIDED = 10**6
"""Largest number of layers or heads whose divisors are tried."""
LOGIT_COPIES = 4
"""Float32 arrays of the size of the logits that exist at once: in training these, their
logarithms and the gradients of both; in inference those of the sampler."""


class RuntimeBytes(NamedTuple):
    """Bytes that a process needs on a device before it loads a model."""

    inference: int
    training: int
    """With torch."""
    programs: int = 0
    """Of recorded programs, for inference."""


RUNTIMES = {
    "cpu": RuntimeBytes(inference=70_000_000, training=400_000_000),
    "cuda": RuntimeBytes(
        inference=760_000_000, training=860_000_000, programs=1_000_000_000
    ),
}  # fmt: skip
"""By kind of device, measured by ``bench/plan_memory.py`` on x86 and an H200."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the planner knows or assumes about a model."""

    params: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    guessed: bool
    """Whether a part was guessed from ``params``."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """A placement of ``tensor * pipeline * expert * data`` devices.

    Bytes are those of the fullest one.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    runtime_bytes: int
    """Of the process: device context, libraries, recorded programs."""
    budget_bytes: int
    fits: bool
    shape: DecoderShape
    """Of the model; what was not given is guessed."""
    reasons: tuple[str, ...]
    """Why this placement, in sentences."""
    expert_parallel: int = 1
    state_bytes: int = 0
    """Of recurrent state, of all sequences."""
    draft_bytes: int = 0
    """Of a layer that predicts further tokens, with its cache."""
    divides_rows: bool = False
    """Whether devices that share experts also divide the sequences and their cache."""

    @property
    def placement(self) -> Placement:
        """The placement of one copy, for ``EngineConfig(placement=...)``."""
        data, expert = 1, self.expert_parallel
        if self.divides_rows:
            data, expert = expert, 1
        return Placement(
            data=data, pipeline=self.pipeline_parallel, tensor=self.tensor_parallel,
            expert=expert,
        )  # fmt: skip

    @property
    def total_bytes(self) -> int:
        """Bytes on the fullest device."""
        return (
            self.weight_bytes + self.kv_bytes + self.activation_bytes
            + self.gradient_bytes + self.optimizer_bytes + self.runtime_bytes
            + self.state_bytes + self.draft_bytes
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What a copy of the model computes; ``runtime`` in bytes."""

    batch: int
    tokens: int
    step_tokens: int
    training: bool
    bytes_per_param: float
    kv_bytes_per_value: float
    device: str | None
    runtime: int
    head_twice: bool
    experts: int = 1
    """Of each layer."""
    expert_params: int = 0
    """Parameters of all experts."""
    state_bytes: int = 0
    """Of recurrent state, of one sequence."""
    expert_copies: int = 0
    """Further experts of each layer on each device that shares them."""

    @property
    def width(self) -> int:
        """Bytes of an activation and of a gradient."""
        return 4 if self.bytes_per_param >= 4 else 2


def _known(
    billions: float, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int,
    vocab: int = 32_000,
) -> DecoderShape:  # fmt: skip
    return DecoderShape(
        int(billions * 1e9), layers, heads * head_dim, heads, kv_heads, head_dim, inner,
        vocab, guessed=True,
    )  # fmt: skip


KNOWN = (
    _known(0.125, 12, 12, 12, 64, 2048, 50_257),
    _known(0.35, 24, 16, 16, 64, 2816, 50_257),
    _known(1.24, 16, 32, 8, 64, 8192, 128_256),
    _known(3.2, 28, 24, 8, 128, 8192, 128_256),
    _known(6.7, 32, 32, 32, 128, 11_008),
    _known(8, 32, 32, 8, 128, 14_336, 128_256),
    _known(13, 40, 40, 40, 128, 13_824),
    _known(34, 48, 64, 8, 128, 22_016),
    _known(70, 80, 64, 8, 128, 28_672),
    _known(123, 88, 96, 8, 128, 28_672),
    # Of the 405B of Llama 3.1, whose 126 layers, embedding and head are the 128 parts
    # that its pipeline divides.
    _known(405, 128, 128, 8, 128, 53_248, 128_256),
)
"""Shapes of published dense decoders, by size."""
NEAR = 1.15
"""Ratio of sizes up to which a model is taken for a known one."""
SMALL = 2_000_000_000
"""Parameters below which heads have 64 elements, else 128."""
GROUPED = 30_000_000_000
"""Parameters from which published models group their heads."""


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
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    inner: int | None = None,
    vocab: int | None = None,
    step_tokens: int | None = None,
    device: str | None = None,
    tied: bool = False,
    experts: int = 1,
    expert_params: int = 0,
    expert_copies: int = 0,
    state_bytes: int = 0,
) -> Parallelism:
    """Choose tensor, pipeline, expert and data parallelism for a decoder on equal
    devices.

    Prefers data parallelism, which needs the least communication, then tensor, then
    expert, then pipeline. Memory is in GB of 1e9 bytes. batch: sequences on each copy
    of the model. layers, hidden, kv_heads, head_dim, inner, vocab: of the model,
    ``inner`` of its feed-forward; guessed from published models of its size if absent,
    which is stated in ``shape`` and the reasons.
    heads: of queries; ``hidden / head_dim`` by default.
    step_tokens: tokens of the largest step of inference, 4096 by default. device:
    "cpu" or "cuda", whose runtime is counted; none is by default. tied: the embedding
    is the head, which "cpu" holds twice unless quantized, as rows and packed. experts,
    expert_params: experts of a layer, and the parameters of all of them, for inference;
    devices that share experts divide the sequences too if there are as many, and
    nothing else of the model. expert_copies: further experts of each layer on each of
    these devices. state_bytes: of recurrent state, of each sequence of
    inference. Training
    is AdamW with gradients of the parameters' width, and a float32 copy of narrower
    parameters; its attention is torch's ``scaled_dot_product_attention``, which keeps
    all probabilities where it has no fused kernel: of float32 with grouped heads on
    "cuda". If nothing fits, the placement with the least memory
    per device is returned with ``fits=False``. Raises
    :class:`~inl.errors.RequestError` for numbers that are not positive, counts that are
    not whole, and numbers that no machine has.
    """
    sizes = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "inner": inner, "vocab": vocab,
    }  # fmt: skip
    counts = {
        "model_size_params": model_size_params, "num_devices": num_devices,
        "batch": batch, "context": context,
        "step_tokens": STEP_TOKENS if step_tokens is None else step_tokens,
    }  # fmt: skip
    counts["experts"] = experts
    whole = {name: _whole(name, value) for name, value in counts.items()}
    if type(expert_params) is not int or not 0 <= expert_params <= model_size_params:
        raise RequestError(
            f"expert_params: found {expert_params!r:.80}, accepted: 0 to "
            "model_size_params"
        )
    if type(state_bytes) is not int or not 0 <= state_bytes < MOST:
        raise RequestError(
            f"state_bytes: found {state_bytes!r:.80}, accepted: 0 or a whole number"
        )
    if type(expert_copies) is not int or not 0 <= expert_copies <= whole["experts"]:
        raise RequestError(
            f"expert_copies: found {expert_copies!r:.80}, accepted: 0 to experts"
        )
    parts = {n: v if v is None else _whole(n, v) for n, v in sizes.items()}
    for name, number in (
        ("memory_per_device_gb", memory_per_device_gb),
        ("bytes_per_param", bytes_per_param),
        ("kv_bytes_per_value", kv_bytes_per_value),
    ):
        if not _is_number(number) or not 0 < number < MOST:
            raise RequestError(f"{name}: found {number!r:.80}, accepted: {POSITIVE}")
    for name, flag in (("training", training), ("tied", tied)):
        if type(flag) is not bool:
            raise RequestError(f"{name}: found {flag!r:.80}, accepted: True or False")
    if device is not None and device not in tuple(RUNTIMES):  # also a list
        raise RequestError(
            f"device: found {device!r:.80}, accepted: {', '.join(RUNTIMES)}, or None"
        )
    num_devices = whole["num_devices"]
    twice = tied and device == "cpu" and not training and bytes_per_param >= 2
    shape = _shape(whole["model_size_params"], parts)
    load = Load(
        whole["batch"], whole["batch"] * whole["context"], whole["step_tokens"],
        training, bytes_per_param, kv_bytes_per_value, device,
        _runtime(device, training), twice, whole["experts"], expert_params,
        state_bytes, expert_copies,
    )  # fmt: skip
    budget = int(memory_per_device_gb * GB * USABLE)
    plans = [
        _plan(shape, (t, p, e, num_devices // (t * p * e)), budget, load)
        for t, p, e in product(
            _divisors(shape.kv_heads, num_devices),
            _divisors(shape.layers, num_devices),
            [1] if training else _divisors(load.experts, num_devices),
        )
        if num_devices % (t * p * e) == 0
    ]
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        best = min(
            fitting,
            key=lambda p: (-p.data_parallel, p.pipeline_parallel, p.expert_parallel),
        )
    else:
        best = min(plans, key=lambda p: p.total_bytes)
    return _explained(best, plans, load, num_devices)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(name: str, value: Any) -> int:
    """Return a number of things; 8e9 is one as well."""
    most = MOST_DIVIDED if name in DIVIDED else MOST
    if not _is_number(value) or not 0 < value <= most:
        raise RequestError(
            f"{name}: found {value!r:.80}, accepted: {POSITIVE}, at most {most:.0e}"
        )
    if value % 1:
        raise RequestError(f"{name}: found {value!r:.80}, accepted: a whole number")
    return int(value)


def _shape(params: int, given: dict[str, int | None]) -> DecoderShape:
    """Complete the ``given`` parts of a shape.

    Without layers and width it is the known shape nearest in size, if that is within
    :data:`NEAR`; else layers and heads are multiples of 8, as known shapes have them,
    so that usual numbers of devices divide them.
    """
    near = min(KNOWN, key=lambda known: abs(math.log(params / known.params)))
    free = given["layers"] is None and given["hidden"] is None
    if free and abs(math.log(params / near.params)) <= math.log(NEAR):
        guess = near
    else:
        guess = _interpolated(params, given)
    parts = {name: value or getattr(guess, name) for name, value in given.items()}
    if given["heads"] is None:
        parts["heads"] = max(parts["hidden"] // parts["head_dim"], 1)
    if given["kv_heads"] is None and parts["heads"] % parts["kv_heads"]:
        parts["kv_heads"] = parts["heads"]
    guessed = any(value is None for name, value in given.items() if name != "heads")
    return DecoderShape(params, guessed=guessed, **parts)


def _interpolated(params: int, given: dict[str, int | None]) -> DecoderShape:
    """Guess from 12 * layers * hidden^2 parameters."""
    layers, hidden = given["layers"], given["hidden"]
    head_dim = given["head_dim"] or (64 if params < SMALL else 128)
    if layers is None and hidden is None:
        sizes = [math.log(known.params) for known in KNOWN]
        depths = [math.log(known.layers) for known in KNOWN]
        depth = math.exp(np.interp(math.log(params), sizes, depths))
        # Smaller than all known: 64 of width for each layer.
        layers = _multiple(min(depth, (params / (12 * 64**2)) ** (1 / 3)))
    if hidden is None:
        assert layers is not None
        hidden = head_dim * _multiple((params / (12 * layers)) ** 0.5 / head_dim)
    if layers is None:
        layers = _multiple(params / (12 * hidden**2))
    head_dim = min(head_dim, hidden)
    heads = given["heads"] or hidden // head_dim
    kv_heads = 8 if params >= GROUPED and heads % 8 == 0 else heads
    return DecoderShape(
        params, layers, hidden, heads, kv_heads, head_dim, hidden * 8 // 3, 32_000, True
    )


def _multiple(number: float) -> int:
    """Round to a multiple of 8, or below 8 to a power of two."""
    if number >= 6:
        return 8 * max(round(number / 8), 1)
    return int(2 ** max(round(math.log2(max(number, 1))), 0))


def _divisors(number: int, limit: int) -> list[int]:
    return [size for size in range(1, min(number, limit) + 1) if number % size == 0]


def _runtime(device: str | None, training: bool) -> int:
    if device is None:
        return 0
    found = RUNTIMES[device]
    return found.training if training else found.inference + found.programs


def _plan(
    shape: DecoderShape, split: tuple[int, int, int, int], budget: int, load: Load
) -> Parallelism:
    tensor, pipeline, expert, data = split
    held = shape.params + load.head_twice * shape.vocab * shape.hidden
    held -= load.expert_params - -(-load.expert_params // expert)
    if expert > 1:
        held += -(-load.expert_params * load.expert_copies // load.experts)
    params = -(-held // (tensor * pipeline))
    # Sequences are divided among devices that share experts if there are enough.
    divides_rows = pipeline == 1 < expert <= load.batch
    share = -(-load.batch // expert) if divides_rows else load.batch
    tokens = load.tokens // load.batch * share
    cached = 2 * shape.kv_heads * shape.head_dim * shape.layers * tokens
    # A stage of training holds the activations of as many micro-batches as there are
    # stages.
    parts = {
        "weight_bytes": int(params * load.bytes_per_param),
        "kv_bytes": int(cached * load.kv_bytes_per_value) // (tensor * pipeline),
        "activation_bytes": _activations(shape, load) // tensor,
        "gradient_bytes": 0,
        "optimizer_bytes": 0,
        # As many layers in each stage; ranks do not divide it.
        "state_bytes": share * load.state_bytes // pipeline,
    }
    if load.training:
        parts["kv_bytes"] = parts["state_bytes"] = 0
        parts["gradient_bytes"] = params * load.width
        # Two moments; a float32 copy of the parameters where these are narrower.
        parts["optimizer_bytes"] = params * (8 if load.width == 4 else 12)
    parts["runtime_bytes"] = load.runtime
    return Parallelism(
        tensor, pipeline, data, budget_bytes=budget,
        fits=sum(parts.values()) <= budget, shape=shape, reasons=(),
        expert_parallel=expert, divides_rows=divides_rows, **parts,
    )  # fmt: skip


def _activations(shape: DecoderShape, load: Load) -> int:
    """Bytes of the inputs and results of a decoder's products and norms."""
    keys = 2 * shape.kv_heads * shape.head_dim
    if load.training:
        if not _attends_fused(shape, load):
            # Keys and values, repeated for all heads, and probabilities.
            keys = shape.heads * (2 * shape.head_dim + load.tokens // load.batch)
        # Kept of each token: three rows of each norm, queries and attention; gate, its
        # activation, up and their product.
        kept = 8 * shape.hidden + keys + 4 * shape.inner
        held, scored = kept * shape.layers * load.tokens, load.tokens
    else:
        # One layer after the other.
        row = 8 * shape.hidden + 4 * shape.inner
        held, scored = row * min(load.tokens, load.step_tokens), load.batch
    return held * load.width + LOGIT_COPIES * 4 * scored * shape.vocab


def _attends_fused(shape: DecoderShape, load: Load) -> bool:
    """Whether torch's ``scaled_dot_product_attention`` has a fused kernel.

    On CUDA its flash and cuDNN kernels take float16 and bfloat16 only, and its
    memory-efficient one, which takes float32, takes no grouped heads
    (``enable_gqa=True``). The flash kernel of the CPU takes both.
    """
    return load.device != "cuda" or load.width < 4 or shape.heads == shape.kv_heads


def _explained(
    best: Parallelism, plans: list[Parallelism], load: Load, devices: int
) -> Parallelism:
    shape, stages = best.shape, best.pipeline_parallel
    reasons = [
        f"each device holds {best.total_bytes / GB:.2f} GB of "
        f"{best.budget_bytes / GB:.2f} GB ({USABLE:.0%} of its memory)"
    ]
    for plan in plans:
        simpler = plan.data_parallel > best.data_parallel and plan.expert_parallel == 1
        if simpler and not plan.fits and plan.pipeline_parallel == 1:
            reasons.append(
                f"tensor parallel {plan.tensor_parallel} with {plan.data_parallel} "
                f"copies would need {plan.total_bytes / GB:.2f} GB per device"
            )
    if stages > 1 and not load.training:
        lanes = min(stages, load.batch)
        reasons.append(
            f"pipeline parallel {stages}: a batch of {load.batch} makes {lanes} of "
            f"{stages} lanes, each in another stage at the same time; no memory beyond "
            "the activations of one step on each device"
        )
    if (shared := best.expert_parallel) > 1:
        rest = "and all of its other weights and of the cache"
        if best.divides_rows:
            share = -(-load.batch // shared)
            rest = (
                f"all of its other weights, and the cache of {share} of {load.batch} "
                "sequences, which the axis data divides"
            )
        reasons.append(
            f"expert parallel {shared}: each device holds "
            f"{load.experts // shared} of {load.experts} experts of a layer, {rest}"
        )
    if best.data_parallel == devices > 1:
        reasons.append("the whole model fits on one device: copies need no exchange")
    sizes = range(2, min(devices, MOST_TRIED) + 1)
    refused = [t for t in sizes if devices % t == 0 and shape.kv_heads % t]
    if refused:
        listed = ", ".join(map(str, refused))
        reasons.append(
            f"tensor parallel {listed}: not a divisor of {shape.kv_heads} "
            "key-value heads"
        )
    if shape.guessed:
        reasons.append(
            f"guessed from the size: {shape.layers} layers of {shape.hidden}, "
            f"{shape.heads} heads and {shape.kv_heads} key-value heads of "
            f"{shape.head_dim}, feed-forward of {shape.inner}, vocabulary of "
            f"{shape.vocab}"
        )
    if not best.fits:
        reasons.append("nothing fits: this placement takes the least memory")
    return replace(best, reasons=tuple(reasons))
