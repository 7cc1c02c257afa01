"""Division of a model among devices, as a plan of ``get_optimal_parallelism`` says."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from inl.errors import MissingPackage, RequestError
from inl.executor.planner import Parallelism
from inl.install_command import install_command
from inl_toolkit.functional.out_of_memory import translating
from inl_toolkit.optimizers.quantize import is_torch_module

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@translating
def apply_parallelism(
    model: Any,
    plan: Parallelism,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    chunks: int = 2,
    tensor_plan: Any = None,
) -> Any:
    """Divide a model among the devices of ``plan``, and return what trains it.

    A ``torch.nn.Module``, the same on each of ``tensor * pipeline * data`` processes of
    an initialized ``torch.distributed`` group: copies by FSDP, linear layers by
    DTensor, and members of a ``torch.nn.Sequential`` in stages, run by ``schedule``:
    "gpipe", "1f1b" or "interleaved", which has ``chunks`` parts on each stage. Returns
    an :class:`inl_torch.parallel.ParallelModel`, whose ``step(inputs, targets)``
    computes the mean loss and its gradients. loss: (outputs, targets) -> mean loss.
    micro_batches: parts of a batch in a pipeline; by default twice the stages.
    tensor_plan: as of torch's ``parallelize_module``; by default each linear layer's
    outputs are divided and gathered.

    Parameters of a JAX model, a tree of arrays: placed on a mesh with the axes "data"
    and "tensor". Returns an :class:`inl_jax.parallel.ShardedParameters`. Raises
    :class:`~inl.errors.RequestError` for what the framework or the model cannot do.
    """
    if not isinstance(plan, Parallelism):
        raise RequestError(
            f"apply_parallelism: plan: found {type(plan).__name__}, accepted: what "
            "get_optimal_parallelism returns"
        )
    if schedule not in SCHEDULES:
        raise RequestError(
            f"schedule: found {schedule!r:.80}, accepted: {', '.join(SCHEDULES)}"
        )
    if plan.expert_parallel > 1:
        raise RequestError(
            f"apply_parallelism: found expert_parallel={plan.expert_parallel}, "
            "accepted: 1; engines divide experts"
        )
    sizes = plan.data_parallel, plan.pipeline_parallel, plan.tensor_parallel
    framework = "torch" if is_torch_module(model) else "jax"
    try:
        module = import_module(f"inl_{framework}.parallel")
    except ImportError as error:
        hint = install_command(f"inl-{framework}")
        raise MissingPackage(f"apply_parallelism: {hint}") from error
    if framework == "jax":
        return module.shard(model, *sizes)
    return module.divide(
        model, *sizes, loss=loss, micro_batches=micro_batches, schedule=schedule,
        chunks=chunks, tensor_plan=tensor_plan,
    )  # fmt: skip
