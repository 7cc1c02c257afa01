"""A backend with kernels of the primitives of contract 1.1, and of no others."""

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.dtypes import wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl_old.backend import only_greedy, sample, tensor

PRIMITIVES = [
    "admit", "all_gather", "all_reduce", "attention", "clip", "combine_experts",
    "drop_overflow", "embedding", "expert_linear", "gated_activation",
    "inl_dynamics", "inl_dynamics_n_steps", "inl_dynamics_step", "linear",
    "load_balance_loss", "make_step", "mask_logits", "prune_last_layer",
    "read_slots", "rms_norm", "rope", "rope_table", "route", "sample", "score",
    "set_token_bias", "sigmoid_gate", "silu", "soft_cap", "take_rows",
    "token_routed_mlp", "write_kv", "write_slots", "zeros_like",
]  # fmt: skip


def kernels():
    yield Kernel("sample", "old", sample, only_greedy, preference=1)
    for name in PRIMITIVES:
        yield Kernel(name, "body", body_kernel(catalog()[name], "float32"))


ListedBackend = simple_backend(
    tensor=tensor, numpy=wrap, kernels=kernels, traits=Traits(dtypes=("float32",))
)
