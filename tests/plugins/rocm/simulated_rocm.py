"""Ranks on the ROCm backend in host memory, which exchange over Gloo.

torch's CPU stands for the GPU, and Gloo for RCCL where the backend asks for it by the
name that torch has for it. Steps are computed by torch's kernels, without graphs.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import distributed

from inl.backend.host import host_memory
from inl.device import Device

RCCL = "nccl"
"""torch's name of RCCL in its ROCm build."""


def serve(options, progress):
    """Serve one rank on the simulated device (factory of a worker)."""
    import inl.plugin
    from inl.runners.rank_startup import serve_rank

    inl.plugin.make_backend = lambda name: open_backend(Device(name))
    return serve_rank(options, progress)


def open_backend(device):
    from inl_rocm import backend
    from inl_torch import collectives
    from inl_torch.gpu import backend as gpu

    replace_memory()
    replace_rccl(collectives)
    gpu.capture = lambda function, pool: gpu.inference_mode(function)
    backend.architecture = lambda _place: "gfx1030"
    opened = object.__new__(backend.RocmBackend)
    opened.device, opened.place = device, torch.device("cpu")
    opened.pool = SimpleNamespace(id=None)
    return opened


def replace_memory():
    """Read the memory of the host, and pin none."""
    memory = host_memory()
    torch.cuda.mem_get_info = lambda _place: (memory.free, memory.total)
    torch.cuda.memory_reserved = torch.cuda.memory_allocated = lambda _place: 0
    torch.Tensor.pin_memory = lambda self: self.clone()


def replace_rccl(collectives):
    """Join a group of Gloo where one of RCCL is asked for, and no other."""
    join, has_library = distributed.init_process_group, distributed.is_backend_available

    def join_gloo(library, **options):
        if library != RCCL:
            raise ValueError(f"asked for {library}, {RCCL} is RCCL's name")
        join("gloo", **options)

    collectives.LIBRARIES["cpu"] = collectives.LIBRARIES["cuda"]
    distributed.init_process_group = join_gloo
    distributed.is_backend_available = lambda name: name == RCCL or has_library(name)
