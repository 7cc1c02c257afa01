"""The kernels of steps of one row, where they can be compiled."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from inl.errors import DeviceError

if TYPE_CHECKING:
    from inl_torch.triton.one_row import OneRowKernels

LOGGER = logging.getLogger(__name__)


@cache
def one_row_kernels(processors: int) -> OneRowKernels | None:
    """Return the kernels for a chip of this many multiprocessors.

    ``None`` where NVRTC or its Python bindings are missing: Triton is used instead.
    """
    try:
        from inl_cuda.one_row.attention import OneRowAttention
        from inl_cuda.one_row.compiler import nvrtc_version
        from inl_cuda.one_row.products import OneRowProducts

        nvrtc_version()
    except (ImportError, DeviceError) as error:
        LOGGER.warning(
            "steps of one row use Triton, which is slower: %s. Try: pip install "
            "cuda-bindings nvidia-cuda-nvrtc",
            error,
        )
        return None
    from inl_torch.triton.one_row import OneRowKernels

    return OneRowKernels(OneRowProducts(processors), OneRowAttention())
