"""Capabilities that no contract promises: any release may change or remove them.

They show the core's own values to a backend, or have the shape of one library. The
backends of this repository offer them, and are released with the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.spec.limits import Limits
from inl.spec.step import Array, Bucket

if TYPE_CHECKING:
    from inl.spec.kernel import Kernel
    from inl.spec.model import Model


class DeviceLoops(NamedTuple):
    """Capability: a program repeats a step until the device finds that all rows ended.

    For devices that would wait for the host between short steps. With it a repeated
    step is one program, "repeat"; without, the runner submits its steps one by one.
    """

    while_loop: Callable[[Callable[[Any], Array], Callable[[Any], Any], Any], Any]
    """(condition, body, value): value = body(value) while condition(value). Values are
    trees of arrays whose shapes and dtypes stay the same, and which the body consumes.
    """
    arrays: Any
    """Module with the functions ``arange``, ``concatenate``, ``cumsum``, ``full``,
    ``where`` and ``zeros`` of NumPy for tensors of the backend. The tensors have
    NumPy's operators, indexing, and methods ``any``, ``reshape`` and ``sum``."""


class WholeModels(NamedTuple):
    """Capability: computes the layers of a model at once, not op by op.

    For runtimes that optimize the graph of a whole model. Steps, embeddings and
    sampling stay functions of the core.
    """

    replace: Callable[[Model], Model]
    """Takes a model and returns one that takes its place in the programs of a runner:
    with the same weights, state and results. Its three functions are called as those of
    every model; they may compute all layers in ``head``."""
    optional: bool = False
    """Whether the backend has kernels for the ops of the model itself. Its own
    functions then compute steps whose hidden states a draft head reads, and those of
    the batch-invariant mode."""
    describe: Callable[[Model, Any, Any, Bucket, Limits], str] | None = None
    """Takes a model, its config, the plans of its weights, a bucket and the limits, and
    returns how the layers of such a step are computed, for ``inl explain``."""


class DecodedBlocks(NamedTuple):
    """Capability: multiplies blocks of 8 bits faster than its dtypes of 16 bits.

    Matrices of a checkpoint that would be decoded to these are then rounded to blocks.
    """

    dtype: str = "q8_0"
    """Dtype of the blocks: 32 columns with a scale in float16. Or "fp8_128", of E4M3:
    128 columns with a scale in float32, for matrices that a file stores in E4M3 and
    whose activations it wants rounded; nothing is rounded to these."""


class WeightCopies(NamedTuple):
    """Capability: packs quantized weights with a wider copy for steps of many rows.

    Used where memory allows. A kernel of this list takes the place of one of the same
    op, name and layout, whose results it has for the same rows or more exact ones.
    """

    kernels: Callable[[], Iterable[Kernel]]
    """Returns the kernels that pack copies."""
    nbytes: Callable[[Any], int]
    """Takes the specs of one rank's tensors of a group, as the op's weights type, and
    returns the bytes of their copies."""
