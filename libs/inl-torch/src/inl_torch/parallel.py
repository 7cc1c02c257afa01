"""Torch modules divided among the processes of a group: copies, tensors and stages.

Stages are run by the schedules of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import distributed, nn

from inl.errors import RequestError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
AXES = ("data", "pipeline", "tensor")


@final
class ParallelModel:
    """The parts of a module that this process has.

    Axes of ``mesh`` are "data", "pipeline" and "tensor", the last innermost: processes
    with one index of "data" take the same batch.
    """

    def __init__(self, parts: list[nn.Module], mesh: Any, loss: Loss | None) -> None:
        self.parts = tuple(parts)
        """The module, or the parts of it that this stage has, in order."""
        self.mesh, self.loss = mesh, loss
        self.schedule: Any = None
        """Of ``torch.distributed.pipelining``; ``None`` with one stage."""
        self.first = self.last = True

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the parts, for an optimizer."""
        for part in self.parts:
            yield from part.parameters()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Add the gradients of the mean loss of a batch, and return that loss.

        inputs, targets: those of this copy, the same on all stages, with the batch
        first; in a pipeline it is divided into equal micro-batches. ``None`` on a stage
        that is not the last.
        """
        if self.loss is None:
            raise RequestError("step: found no loss, which apply_parallelism takes")
        if self.schedule is None:
            loss = self.loss(self.parts[0](inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        count = self.schedule._n_microbatches
        if len(inputs) % count:
            raise RequestError(
                f"step: found a batch of {len(inputs)}, accepted: a multiple of "
                f"{count}, the micro-batches"
            )
        losses: list[torch.Tensor] = []
        given = (inputs,) if self.first else ()
        wanted = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*given, **wanted)
        return torch.stack(losses).mean().detach() if self.last else None


def divide(
    model: nn.Module,
    data: int,
    pipeline: int,
    tensor: int,
    *,
    loss: Loss | None,
    micro_batches: int | None,
    schedule: str,
    chunks: int,
    tensor_plan: Any,
) -> ParallelModel:
    """As :func:`inl.optimizers.apply_parallelism`."""
    mesh = _mesh(data, pipeline, tensor)
    device = _device()
    count = pipeline * (chunks if schedule == "interleaved" and pipeline > 1 else 1)
    parts = _split(model, count) if count > 1 else [model]
    rank = mesh["pipeline"].get_local_rank()
    own = {index: parts[index].to(device) for index in range(rank, count, pipeline)}
    for part in own.values():
        if tensor > 1:
            _divide_layers(part, mesh["tensor"], tensor_plan)
        if data > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(part, mesh=mesh["data"])
    found = ParallelModel(list(own.values()), mesh, loss)
    if pipeline > 1:
        batches = 2 * pipeline if micro_batches is None else micro_batches
        found.first, found.last = 0 in own, count - 1 in own
        group = mesh["pipeline"].get_group()
        found.schedule = _schedule(own, count, group, device, loss, batches, schedule)
    return found


def _mesh(data: int, pipeline: int, tensor: int) -> Any:
    needed = data * pipeline * tensor
    found = distributed.get_world_size() if distributed.is_initialized() else None
    if found != needed:
        text = "no process group" if found is None else f"{found} processes"
        raise RequestError(
            f"apply_parallelism: found {text}, accepted: torch.distributed of "
            f"{needed}, data={data} * pipeline={pipeline} * tensor={tensor}, such as "
            "by torchrun"
        )
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        _device().type, (data, pipeline, tensor), mesh_dim_names=AXES
    )


def _device() -> torch.device:
    if distributed.is_initialized() and distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _split(model: nn.Module, count: int) -> list[nn.Module]:
    """Divide the members of a sequence into parts of about equal numbers of weights."""
    members = list(model) if isinstance(model, nn.Sequential) else []
    if len(members) < count:
        text = f"{len(members)} members" if members else type(model).__name__
        raise RequestError(
            f"apply_parallelism: found {text}, accepted: a torch.nn.Sequential of at "
            f"least {count} members, the stages"
        )
    sizes = [sum(p.numel() for p in member.parameters()) for member in members]
    parts: list[nn.Module] = []
    start, before, total = 0, 0, sum(sizes)
    for index in range(count):
        # Each part that follows needs a member.
        stop, most = start + 1, len(members) - (count - 1 - index)
        before += sizes[start]
        while stop < most and (
            index == count - 1 or before + sizes[stop] / 2 < total * (index + 1) / count
        ):
            before += sizes[stop]
            stop += 1
        parts.append(nn.Sequential(*members[start:stop]))
        start = stop
    return parts


def _divide_layers(part: nn.Module, mesh: Any, plan: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        parallelize_module,
    )

    if plan is None:
        plan = {
            name: ColwiseParallel(output_layouts=Replicate())
            for name, layer in part.named_modules()
            if isinstance(layer, nn.Linear) and layer.out_features % mesh.size() == 0
        }
    parallelize_module(part, mesh, plan)


def _schedule(
    own: dict[int, nn.Module],
    count: int,
    group: Any,
    device: torch.device,
    loss: Loss | None,
    micro_batches: int,
    kind: str,
) -> Any:
    from torch.distributed import pipelining

    stages: list[Any] = [
        pipelining.PipelineStage(part, index, count, device, group=group)
        for index, part in own.items()
    ]
    try:
        if kind == "interleaved":
            return pipelining.ScheduleInterleaved1F1B(
                stages,
                micro_batches,
                loss_fn=loss,
            )
        name = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}[kind]
        return getattr(pipelining, name)(stages[0], micro_batches, loss_fn=loss)
    except ValueError as error:
        raise RequestError(
            f"micro_batches: found {micro_batches} in a pipeline {kind}: {error}"
        ) from error
