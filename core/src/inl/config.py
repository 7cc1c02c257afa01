"""EngineConfig: settings of an engine, each with a default."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.placement.placement import Placement, parse_placement
from inl.plugin.contribution import AUTOMATIC as AUTOMATIC
from inl.plugin.contribution import OWN_DRAFTERS
from inl.spec.step import SAMPLERS
from inl.weights.quantize.report import KINDS

if TYPE_CHECKING:
    from pathlib import Path

    from inl.device import Device

MAX_COUNT = 2**62

UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
"""Units of sizes, in lower case -> bytes."""

MAX_DECODE_STEPS = 64

DEFAULT_DRAFTS = 15
"""Default of ``max_drafts``: rows of 16 tokens."""

MAX_DRAFTS = 127

MAX_ADAPTERS = 1024
MAX_ADAPTER_RANK = 512

OPTIONAL_COUNTS = (
    "max_batch", "token_budget", "context", "cache_bytes", "depth", "decode_steps",
    "max_drafts", "max_adapters", "expert_load_interval",
)  # fmt: skip
"""Fields that are ``None`` or a whole number of 1 or more."""

REQUEST_BOUNDS = (
    "max_queued_requests",
    "max_queued_tokens",
    "max_stop_strings",
    "max_stop_length",
    "max_logit_bias",
    "max_grammar_bytes",
    "max_samples",
)
"""Fields that bound what requests may hold."""


ROLES = ("both", "prefill", "decode")
"""What an engine computes of a request."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Device, memory and scheduling settings of an engine.

    Raises :class:`~inl.errors.RequestError` for a value that is not accepted.
    """

    backend: str | Device = "auto"
    """Device such as "cpu" or "cuda:1". "auto" selects the best available one;
    "worker:PATH_TO_PYTHON/cuda:1" runs on a device of another Python interpreter,
    "join:HOST:PORT/cuda:1" of another host."""
    placement: str | Placement | None = None
    """Devices that share the model, as sizes of axes: "tensor=4,data=2" divides heads
    and inner lanes ("tensor"), and the rows of steps or the blocks of caches ("data");
    "pipeline" divides the layers into stages, which compute different steps at the same
    time, "expert" the experts. They are the named device and those after it, or those
    that it lists ("tensor=2,devices=cuda:0+cuda:2"). A TPU drives all by one program,
    other devices by one process each; "tensor=16,hosts=4" are TPUs of four hosts.
    "tensor" must divide the query heads, and divide or be a multiple of the key-value
    heads. ``None`` is one device."""
    tensor_parallel: int = 1
    """Short for ``placement="tensor=N"`` with one process for each device."""
    mesh: str | None = None
    """Short for a ``placement`` whose devices one program drives, as TPUs do."""
    dtype: str = "auto"
    """Compute dtype, such as "bfloat16". "auto" is the backend's preferred one."""
    kv_dtype: str = "auto"
    """Dtype of cached keys and values. "auto" is what the checkpoint asks for, or else
    the compute dtype. "int8", with one scale per token and head, and "fp8" (E4M3), with
    the scales of the checkpoint or 1, take half the memory of bfloat16."""
    quantize: str | None = None
    """Quantization of the matrices of the layers while a checkpoint of floats is
    loaded: "int8" (8.5 bits a weight), "fp8" (E4M3, 8.25 bits) or "int4" (5 bits), each
    with a scale for 32 weights. The error is measured and logged. Embeddings, head,
    norms and routers stay as stored. ``None`` loads what the checkpoint has."""
    weight_copies: bool | None = None
    """Whether matrices that ``quantize`` stores in 4 bits also have a copy in 8, which
    steps of more than 32 tokens multiply: on NVIDIA GPUs from compute capability 9.0
    on. ``None``: where copies take at most a quarter of the memory that the weights and
    ``cache_bytes`` leave."""
    mmproj: str | None = None
    """GGUF file with the vision encoder of a language model in a GGUF file. ``None``:
    the first file beside it whose name begins with "mmproj" and that is of the model,
    if there is one."""
    vision_backend: str | Device | None = None
    """Device of this process that encodes images, beside the steps of ``backend``.
    ``None`` is ``backend``, where images take turns with steps."""
    use_kv_cache: bool = True
    """Whether keys and values are cached. ``False`` computes the whole sequence again
    for each token."""
    prefix_cache: bool = True
    """Whether prompts with equal leading tokens share cached blocks."""
    max_batch: int | None = None
    """Maximum number of sequences that run at the same time. ``None``: the backend's
    preference, 8 on a processor and 256 on a GPU."""
    token_budget: int | None = None
    """Maximum number of tokens per step; longer prompts are processed in chunks. A
    larger budget speeds up prefill, takes more memory, and delays the sequences that
    decode in the same step. ``None``: the backend's preference."""
    inter_token_ms: float | None = None
    """Milliseconds that a step is expected to take at most in which sequences decode
    beside prompts: their next tokens arrive with its end. Steps that take less read
    prompts more slowly. By measured times; ``None``: such steps have a quarter of the
    token budget, or 2,048 tokens if that is more, and more where many prompts wait."""
    context: int | None = None
    """Maximum number of tokens of prompt and output. ``None``: the model's maximum, or
    what ``cache_bytes`` has room for if that is less."""
    kv_host: str | None = None
    """Host memory for blocks of the cache that the device's has no room for, such as
    "8GiB". They are read again where that takes less time than computing them. It is
    allocated as blocks need it. ``None``: a quarter of the free memory, and at most 4
    times the cache, where blocks are copied beside the steps, as a GPU does; on a
    processor what the cache leaves of ``cache_bytes``, or of that quarter. None below
    256 MiB, for devices of other processes and with a ``placement``. "0": none."""
    kv_disk: str | None = None
    """Files for blocks that the host's memory has no room for, which later processes
    read too: a size and a folder, such as "100GiB:/var/cache/inl". ``None``: none."""
    snapshot_host: str | None = None
    """Host memory for snapshots of recurrent state, such as "2GiB". Models that have it
    share leading tokens of prompts only up to a snapshot. ``None``: an eighth of the
    memory that is free, 8 GiB at most. "0": none, so that nothing is shared."""
    role: str = "both"
    """"prefill" computes prompts for other engines too, which connect to ``kv_peer``;
    "decode" lets the engines at ``kv_peer`` compute long prompts, and computes itself
    what does not arrive, with the same tokens; it needs ``kv_host``. "both" does
    neither. Engines of two hosts need one secret, in ``INL_WORKER_SECRET_FILE``."""
    kv_peer: str | None = None
    """Address of the role "prefill", such as "10.0.0.1:7100", or addresses of the role
    "decode", separated by commas."""
    kv_transport: str | None = None
    """A plugin's transport of contents between those, such as "nixl" of the package
    inl-nixl; both have the same. ``None``: the connection, encrypted between hosts."""
    kv_store: str | None = None
    """A plugin's store of blocks that engines of several hosts share, and its address,
    such as "mooncake:10.0.0.1:50051" of the package inl-mooncake. Blocks of requests
    that have finished are written there, and read where they are lacking; it needs
    ``kv_host``. Records are signed by the secret in ``INL_WORKER_SECRET_FILE``.
    ``None``: none."""
    cache_bytes: int | None = None
    """Bytes for cached keys and values, per device. ``None``: a quarter of the memory
    that is free; on a GPU nine tenths of it, less what the largest step needs."""
    depth: int | None = None
    """Number of steps in flight. ``None``: the backend's preference; of a pipeline, one
    more than it has stages. 1 turns its lanes off: one stage computes at a time."""
    decode_steps: int | None = None
    """Most tokens of each sequence between two answers of the device. Above 1, tokens
    arrive in groups while all sequences decode and none waits; cancellations, deadlines
    and new requests take effect between groups, of which each is expected to take 0.1
    seconds at most. 1 is the lowest latency of each token. ``None``: the backend's
    preference; 1 with speculation or without a KV cache."""
    sampling: str = "sample_filtered"
    """Costliest sampler that requests may use: "greedy"; "sample", with temperatures;
    "sample_filtered", also with filters, penalties, biases and logprobs. The last takes
    8 bytes per token of the vocabulary and sequence of the batch."""
    generation_config: str = "auto"
    """Default of the sampling options of requests: "auto" is what the model's
    ``generation_config.json``, or ``general.sampling`` in a GGUF file, says of
    temperature, top_k, top_p, min_p and repetition_penalty; "none" does not read it."""
    expert_copies: str | None = None
    """"N:FILE": N further experts of each layer on each of the devices that share them
    ("expert" and "data" in the placement). They are copies of the experts that most
    tokens of FILE choose, the JSON of ``inl bench --json`` with
    ``expert_load_interval``; each token goes to one copy, by its own choice of experts.
    Not with a pipeline, adapters, or a mesh. ``None``: every expert once."""
    expert_load_interval: int | None = None
    """Steps from one to the next in which the tokens of each expert of a mixture are
    counted, for ``inl:expert_load_imbalance`` in the metrics and
    :attr:`~inl.engine.core.EngineCore.expert_loads`. Such a step copies the routing of
    its tokens to the host, and has a program of its own. Not with a pipeline. ``None``
    counts none."""
    check_weights: bool = True
    """Whether loading raises :class:`~inl.errors.CheckpointError` for NaN and infinity
    in the weights. The check runs at several GB/s."""
    max_queued_requests: int = 1024
    """Maximum number of requests that wait to run. One more raises
    :class:`~inl.errors.QueueFull`. Only the first prompt of a list needs room: the
    others are queued as earlier ones start."""
    max_queued_tokens: int = 1 << 20
    """Maximum number of tokens of the prompts that wait to run, as above. A prompt of
    any length may wait alone."""
    max_stop_strings: int = 64
    """Maximum number of stop strings of a request."""
    max_stop_length: int = 1024
    """Maximum number of characters of a stop string."""
    max_logit_bias: int = 1024
    """Maximum number of tokens in the ``logit_bias`` of a request."""
    max_grammar_bytes: int = 1 << 20
    """Maximum size of the ``structured`` option of a request."""
    max_samples: int = 128
    """Maximum number of completions of one prompt (``n``)."""
    speculation: str | None = "auto"
    """Source of drafted tokens, several of which a step verifies; outputs are the same
    with and without. "ngram" searches prompt and output for the last tokens, "model"
    asks ``draft_model``, "eagle" an EAGLE-3 head of the model in ``draft_model``, "mtp"
    the layer of the model's own checkpoint that predicts further tokens, any other name
    a drafter of a plugin; ``None`` decodes one token per step. "auto" is "mtp" where
    the checkpoint has such a layer, the model runs on one device of this process, and
    the times that are measured at the start say that it pays; ``None`` otherwise."""
    draft_model: str | Path | None = None
    """Folder, GGUF file or known name of a small model with the same tokenizer, for
    ``speculation="model"``; the folder of a draft head, for "eagle"."""
    draft_backend: str | Device | None = None
    """Device of the draft model, also of another interpreter. ``None``: the same as
    ``backend``."""
    max_drafts: int | None = None
    """Maximum number of drafted tokens per sequence and step. ``None``: 15 if
    ``speculation`` is set, 7 of the layer that "auto" takes."""
    adaptive_drafts: bool = True
    """Whether the number of drafted tokens is chosen for speed, from the times of steps
    that are measured at the start (about two seconds). ``False`` verifies every drafted
    token."""
    invariant: bool = False
    """Whether only kernels are used whose results do not depend, in any bit, on the
    rest of the batch."""
    adapters: Mapping[str, str | Path] | None = None
    """LoRA adapters to load at the start: name -> PEFT folder. Requests choose one by
    ``adapter``; others can be loaded later by
    :meth:`~inl.engine.inference_engine.InferenceEngine.load_adapter`."""
    max_adapters: int | None = None
    """Maximum number of adapters that are loaded at the same time. Each takes memory
    and, where a device has no grouped kernel, time in every step. ``None``: as many as
    ``adapters`` has; without any, programs have no room for adapters and cost
    nothing."""
    max_adapter_rank: int = 16
    """Maximum rank of an adapter."""
    warm_up: bool = False
    """Whether all programs are compiled before the engine starts, as a server should.
    ``False`` compiles each at its first use, which delays the first requests."""
    allow_hosted: bool = False
    """Whether ops without a kernel are computed in NumPy on the host, which is slow.
    ``False`` raises :class:`~inl.errors.NoKernel`."""
    velocity: str | None = None
    """State of an INL model: "reset" starts each token at rest, "carry" continues from
    the previous token. ``None``: as the model's config says."""
    on_worker_loss: str = "raise"
    """"raise" ends every request with :class:`~inl.errors.WorkerLost`; "restart" starts
    a new worker, rebuilds every sequence and continues."""
    restart_device: str | Device | None = None
    """Device of the new worker. ``None``: the same as ``backend``."""
    worker_seconds: float = 600.0
    """Seconds without a sign of life, while loading or computing, after which a worker
    counts as lost; ``math.inf`` waits without limit."""
    trace: str | Path | None = None
    """File that records everything the runner receives and returns, for ``inl replay``.
    ``None``: the last steps are kept in memory only."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                self._check(field.name, type(value) is bool, "True or False")
        for name in (
            "max_adapter_rank",
            "tensor_parallel",
            *REQUEST_BOUNDS,
        ):
            value = getattr(self, name)
            self._check(name, _is_count(value), "a whole number of 1 or more")
        for name in OPTIONAL_COUNTS:
            value = getattr(self, name)
            valid = value is None or _is_count(value)
            self._check(name, valid, "None or a whole number of 1 or more")
        valid = self.inter_token_ms is None or _is_positive(self.inter_token_ms)
        self._check("inter_token_ms", valid, "None or a number of milliseconds above 0")
        valid = _is_positive(self.worker_seconds)
        self._check("worker_seconds", valid, "a number of seconds above 0")
        for name in ("dtype", "kv_dtype"):
            valid = isinstance(getattr(self, name), str)
            self._check(name, valid, "the name of a dtype")
        self._check("sampling", self.sampling in SAMPLERS, " or ".join(SAMPLERS))
        valid = self.generation_config in ("auto", "none")
        self._check("generation_config", valid, "auto or none")
        valid = self.velocity in (None, "reset", "carry")
        self._check("velocity", valid, "None, reset or carry")
        if self.speculation not in (None, AUTOMATIC, *OWN_DRAFTERS):
            self._check_plugin_drafter()
        valid = self.quantize in (None, *KINDS)
        accepted = f"None, {', '.join(KINDS)}"
        self._check("quantize", valid, accepted)
        valid = self.weight_copies in (None, True, False)
        self._check("weight_copies", valid, "None, True or False")
        self._check_tiers()
        self._check_placement()
        self._check_drafts()
        self._check_decode_steps()
        self._check_adapters()
        valid = self.on_worker_loss in ("raise", "restart")
        self._check("on_worker_loss", valid, "raise or restart")

    def _check_tiers(self) -> None:
        """Check where blocks are stored that the device has no room for."""
        accepted = 'None or a size, such as "8GiB"'
        size = self.kv_host
        self._check("kv_host", size is None or size_of(size) is not None, accepted)
        size = self.snapshot_host
        valid = size is None or size_of(size) is not None
        self._check("snapshot_host", valid, accepted)
        accepted = 'None, or a size and a folder, such as "100GiB:/var/cache/inl"'
        size, _, folder = str(self.kv_disk).partition(":")
        valid = self.kv_disk is None or (bool(folder) and bool(size_of(size)))
        self._check("kv_disk", valid, accepted)
        self._check("role", self.role in ROLES, ", ".join(ROLES))
        needs_peer = self.role != "both"
        accepted = "HOST:PORT" if needs_peer else "None with the role both"
        self._check("kv_peer", bool(self.kv_peer) == needs_peer, accepted)
        if self.kv_transport is not None:
            from inl.plugin import registry

            names = sorted(registry().names("transport"))
            accepted = "None, or with a role that of a plugin: "
            accepted += ", ".join(names) or "none is installed"
            valid = needs_peer and self.kv_transport in names
            self._check("kv_transport", valid, accepted)
        if self.kv_store is not None:
            from inl.plugin import registry

            names = sorted(registry().names("store"))
            accepted = "None, or NAME:ADDRESS with the name of a plugin: "
            accepted += ", ".join(names) or "none is installed"
            name, _, address = self.kv_store.partition(":")
            self._check("kv_store", bool(address) and name in names, accepted)
            self._check("kv_host", self.host_bytes > 0, "a size with a kv_store")
        if self.role == "decode":
            self._check("kv_host", self.host_bytes > 0, "a size with the role decode")

    @property
    def host_bytes(self) -> int:
        """Bytes that ``kv_host`` says, 0 for ``None``."""
        return 0 if self.kv_host is None else size_of(self.kv_host) or 0

    @property
    def has_tiers(self) -> bool:
        """Whether the config asks to store blocks that the device has no room for."""
        return bool(self.host_bytes) or self.kv_disk is not None

    @property
    def disk_tier(self) -> tuple[int, str] | None:
        """Bytes and folder of ``kv_disk``."""
        if self.kv_disk is None:
            return None
        size, _, folder = self.kv_disk.partition(":")
        return size_of(size) or 0, folder

    @property
    def adapter_slots(self) -> int:
        """Number of adapters that programs have room for."""
        return self.max_adapters or len(self.adapters or ())

    @property
    def adapter_rank(self) -> int:
        """Maximum rank of an adapter, 0 without adapters."""
        return self.max_adapter_rank if self.adapter_slots else 0

    def _check_adapters(self) -> None:
        """Check the settings of adapters together."""
        given = self.adapters
        valid = given is None or (
            isinstance(given, Mapping)
            and all(isinstance(name, str) and name for name in given)
            and all(isinstance(path, str | os.PathLike) for path in given.values())
        )
        self._check("adapters", valid, "None or a dict of names and PEFT folders")
        valid = self.adapter_slots >= len(given or ())
        accepted = f"None or at least {len(given or ())}, the number of adapters"
        self._check("max_adapters", valid, accepted)
        slots = self.adapter_slots
        self._check("max_adapters", slots <= MAX_ADAPTERS, f"up to {MAX_ADAPTERS}")
        valid = self.max_adapter_rank <= MAX_ADAPTER_RANK
        self._check("max_adapter_rank", valid, f"1 to {MAX_ADAPTER_RANK}")

    @property
    def division(self) -> Placement:
        """The placement that ``placement``, ``tensor_parallel`` or ``mesh`` says."""
        if self.placement is None and self.mesh is None:
            return Placement(tensor=self.tensor_parallel)
        if self.mesh is not None:
            return parse_placement(self.mesh, "mesh")
        return parse_placement(self.placement)

    def _check_placement(self) -> None:
        """Check the division of the model, which one of three options sets."""
        assert self.division, "it is parsed"
        valid = self.mesh is None or self.placement is None
        self._check("mesh", valid, "None with a placement")
        valid = (
            self.mesh is None and self.placement is None
        ) or self.tensor_parallel == 1
        accepted = "1 with a placement or a mesh, which have their own axes"
        self._check("tensor_parallel", valid, accepted)
        valid = self.expert_load_interval is None or self.division.pipeline == 1
        self._check("expert_load_interval", valid, "None with a pipeline")
        if self.expert_copies is not None:
            from inl.weights.expert_copies import parse_copies

            parse_copies(self.expert_copies)
            valid = self.division.pipeline == 1 and not self.adapter_slots
            accepted = "None with a pipeline or adapters"
            self._check("expert_copies", valid, accepted)

    def _check_plugin_drafter(self) -> None:
        from inl.plugin import registry

        names = sorted(registry().names("drafter"))
        accepted = "None, auto, ngram, model, eagle or mtp"
        accepted += f", or of a plugin: {', '.join(names) or 'none is installed'}"
        self._check("speculation", self.speculation in names, accepted)

    def _check_drafts(self) -> None:
        """Check the settings of speculation together."""
        has_model = self.speculation in ("model", "eagle")
        valid = has_model == (self.draft_model is not None)
        accepted = 'a model with speculation="model" or "eagle", None otherwise'
        # A drafter of a plugin may use one.
        if self.speculation in (None, AUTOMATIC, *OWN_DRAFTERS):
            self._check("draft_model", valid, accepted)
        valid = self.draft_backend is None or self.speculation == "model"
        self._check("draft_backend", valid, 'None without speculation="model"')
        if self.has_draft_head:
            accepted = f'1 with speculation="{self.speculation}"'
            self._check("tensor_parallel", self.tensor_parallel == 1, accepted)
            valid = self.placement is None or self.division.count == 1
            self._check("placement", valid, 'one device with speculation="eagle"')
        valid = self.max_drafts is None or self.max_drafts <= MAX_DRAFTS
        self._check("max_drafts", valid, f"None or 1 to {MAX_DRAFTS}")
        valid = not self.is_speculating or self.use_kv_cache
        self._check("speculation", valid, "None with use_kv_cache=False")

    def _check_decode_steps(self) -> None:
        steps = self.decode_steps or 1
        accepted = f"None or 1 to {MAX_DECODE_STEPS}"
        self._check("decode_steps", steps <= MAX_DECODE_STEPS, accepted)
        valid = steps == 1 or (self.use_kv_cache and not self.is_speculating)
        accepted = "None or 1 with speculation or use_kv_cache=False"
        self._check("decode_steps", valid, accepted)

    @property
    def is_speculating(self) -> bool:
        """Whether a drafter is set; "auto" sets none until the engine chooses."""
        return self.speculation not in (None, AUTOMATIC)

    @property
    def has_draft_head(self) -> bool:
        """Whether drafts are computed from the hidden states of steps."""
        return self.speculation in ("eagle", "mtp")

    def steps_in_flight(self, preferred: int) -> int:
        """Return the most steps in flight; steps that a draft head reads are alone.

        preferred: the backend's preference.
        """
        return self.depth or preferred

    def repeated_steps(self, preferred: int) -> int:
        """Return the most decoding steps of a step of the runner.

        preferred: the backend's preference.
        """
        if self.decode_steps is None and self.use_kv_cache and not self.draft_limit:
            return preferred
        return self.decode_steps or 1

    @property
    def draft_limit(self) -> int:
        """Most drafted tokens of a row that the runner's programs verify; 0 for none.

        A worker gets ``max_drafts`` alone: its parent drafts.
        """
        return self.max_drafts or (DEFAULT_DRAFTS if self.is_speculating else 0)

    def _check(self, name: str, valid: bool, accepted: str) -> None:
        if not valid:
            raise RequestError(
                f"EngineConfig.{name}: found {getattr(self, name)!r}, "
                f"accepted: {accepted}"
            )


def size_of(text: object) -> int | None:
    """Return the bytes of a size such as "8GiB" or "500MB"; ``None`` if it is none."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]*)", str(text))
    unit = UNITS.get(found[2].lower()) if found else None
    return None if found is None or unit is None else int(float(found[1]) * unit)


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > 0


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value < MAX_COUNT
