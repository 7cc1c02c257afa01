"""A backend class with the methods and most of the capabilities of contract 1.2."""

import numpy as np

from inl.backend.base import (
    Backend,
    CachedMemory,
    ContextLengths,
    DecodedBlocks,
    DeviceLoops,
    DeviceMemory,
    ForkSafety,
    StorageDtypes,
    Traits,
    WeightUpdates,
    WholeModels,
)
from inl.backend.reference import body_kernel
from inl.backend.simple import plain_state
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.program import PROGRAMS
from inl.spec.step import Bucket
from inl_vendor.step import KERNELS

BODIES = [
    "activate", "all_gather", "all_reduce", "attention", "causal_conv",
    "chunk_rows", "clip", "combine_experts", "delta_rule", "drop_overflow",
    "embedding", "expert_linear", "gated_activation", "group_route", "head_linear",
    "inl_dynamics", "inl_dynamics_n_steps", "inl_dynamics_step", "join_lanes",
    "layer_norm", "linear", "load_balance_loss", "mask_logits", "prune_last_layer",
    "read_slots", "rms_norm", "rope", "rope_table", "route", "sample", "score",
    "set_token_bias", "sigmoid_gate", "silu", "sink_attention", "soft_cap",
    "take_rows", "temper_queries", "token_routed_mlp", "write_kv", "write_slots",
    "zeros_like",
]  # fmt: skip


def tensor(host):
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def kernels():
    yield from KERNELS
    for name in BODIES:
        yield Kernel(name, "body", body_kernel(catalog()[name], "float32"))


def buckets(limits):
    rows = min(8, limits.slots - 1)
    sizes = sorted({(1, 1, 1), (rows, rows, 1), (max(64, rows), rows, 1)})
    if limits.max_drafts:
        width = limits.max_drafts + 1
        sizes += [(width, 1, width), (rows * width, rows, width)]
    return [Bucket(*size, name) for size in sizes for name in limits.samplers]


def while_loop(condition, body, value):
    while condition(value):
        value = body(value)
    return value


def replace(tensor, host):
    tensor[...] = widen(host)
    return tensor


class VendorBackend(Backend):
    """Buckets, several contexts, repeated steps as one program."""

    traits = Traits(("float32",), 8, 2, 4)

    def __init__(self, device):
        self.device = device

    def tensor(self, data, *, axis=None):
        return tensor(data)

    def numpy(self, x):
        return wrap(np.asarray(x))

    def state(self, spec, *, limits):
        return plain_state(spec, limits, self.tensor)

    def memory(self):
        return DeviceMemory(1 << 30, 1 << 29)

    def kernels(self):
        return kernels()

    def buckets(self, limits):
        return buckets(limits)

    def compile(self, function, bucket, *, consumes, info):
        assert info.name in PROGRAMS, info.name
        assert (bucket is None) == (info.bucket is None)
        return lambda *args: function(*args)

    def offers(self, kind):
        offered = (
            ContextLengths(lambda limits: [32, 64]), DeviceLoops(while_loop, np),
            WeightUpdates(replace), CachedMemory(lambda: None), ForkSafety(),
            WholeModels(lambda model: model, True), DecodedBlocks(),
            StorageDtypes(("float32",), lambda dtype: VendorBackend(self.device)),
        )  # fmt: skip
        return next((each for each in offered if isinstance(each, kind)), None)
