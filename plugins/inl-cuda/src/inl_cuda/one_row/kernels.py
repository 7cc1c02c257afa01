"""The kernels of steps of one row, where they can be compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from inl.errors import DeviceError
from inl.install_command import install_command
from inl.spec.activation_quant import FLOAT8
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE

if TYPE_CHECKING:
    from inl_torch.triton.int4.weights import Int4
    from inl_torch.triton.tuning import Tuning

LOGGER = logging.getLogger(__name__)

STORED_PREFERENCE: Final = PREFERENCE + 3
"""Above Triton's kernels for stored weights."""


@cache
def can_compile() -> bool:
    """Whether NVRTC and its Python bindings are installed; warns once if not."""
    try:
        from inl_cuda.one_row.compiler import nvrtc_version

        nvrtc_version()
    except (ImportError, DeviceError) as error:
        LOGGER.warning(
            "steps of one row use Triton, which is slower: %s. Try: %s",
            error,
            install_command("cuda-bindings", "nvidia-cuda-nvrtc"),
        )
        return False
    return True


def attention_kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the attention of one token."""
    from inl_cuda.one_row import attention

    yield Kernel(
        "rope_attend",
        "cuda",
        partial(attention.rope_attend, pdl=tuning.uses_pdl(1)),
        refuse=attention.refuse,
        preference=PREFERENCE + 3,
    )


def float8_kernels(tuning: Tuning) -> Iterable[Kernel]:
    """Return the products of one row with weights in E4M3."""
    from inl_cuda.one_row.products import OneRowProducts
    from inl_cuda.one_row.stored import OneRowFirst
    from inl_torch.triton.float8 import products, weights
    from inl_torch.triton.matmul.stored_kernels import stored_kernels

    one_row = OneRowFirst(
        products.Products(tuning), OneRowProducts(tuning.processors), is_int4=False,
        pdl=tuning.uses_pdl(1),
    )  # fmt: skip
    return stored_kernels(
        "float8", ("cuda",), ("cuda", "cuda+triton", "cuda+eager"),
        weights.FLOAT8_ROWS, weights.refuse_float8, weights.stacked_float8, one_row,
        activation_quant=FLOAT8, preference=STORED_PREFERENCE,
    )  # fmt: skip


def int4_kernels(
    tuning: Tuning, stack: Callable[..., Int4] | None = None
) -> Iterable[Kernel]:
    """Return the products of one row with weights of 4 bits.

    Groups of 32 codes are multiplied by Triton, wide ones by CUDA C++: which ones a
    matrix has is known when its scales are loaded. stack: as that of Triton's kernels.
    """
    from inl_cuda.one_row.products import OneRowProducts
    from inl_cuda.one_row.stored import OneRowFirst
    from inl_torch.triton.int4 import products, weights
    from inl_torch.triton.matmul.stored_kernels import stored_kernels

    one_row = OneRowFirst(
        products.Products(tuning), OneRowProducts(tuning.processors), is_int4=True,
        pdl=tuning.uses_pdl(1),
    )  # fmt: skip
    return stored_kernels(
        "int4", ("cuda+triton",), ("cuda+triton", "cuda+triton+eager"),
        weights.INT4_CHUNKS, weights.refuse_int4, stack or weights.stacked_int4,
        one_row,
        activation_quant=FLOAT8, preference=STORED_PREFERENCE,
    )  # fmt: skip
