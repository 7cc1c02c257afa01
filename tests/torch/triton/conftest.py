"""Fixes of Triton's interpreter.

It replaces the functions of ``triton.language`` at each call of a device function, and
makes a table of dtypes at each operation, which takes half of its time. It multiplies
the bit patterns of bfloat16 matrices, truncates where it should round, and reduces by
uncommon functions one element at a time, which is slow. NumPy's products of float32
depend on the place of a row in its matrix, which those of a chip do not. A chip adds
the products of a few columns at a time: its sums do not depend on the width of tiles.

What torch allocates without values has values that no kernel may use.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import interpreter_speed
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    # For such small tensors, a second thread takes longer to start than to compute.
    torch.set_num_threads(1)
    interpreter_speed.apply()

    COLUMNS = 16
    """Columns that a matrix unit multiplies at a time."""

    plain_patch = interpreter._patch_lang

    @cache
    def patch_once(function):
        """Replace the functions that ``function`` sees, and leave them replaced."""
        plain_patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once

    plain_dtype, dtypes = interpreter._get_np_dtype, {}

    def dtype_of(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = plain_dtype(dtype.scalar)
        return dtypes[name]

    interpreter._get_np_dtype = dtype_of

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data.astype(np.float64)
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)

    def create_dot(_self, a, b, d, _precision, _imprecise):
        x, y, total = widened(a), widened(b), d.data
        for begin in range(0, x.shape[-1], COLUMNS):
            some = slice(begin, begin + COLUMNS)
            product = np.matmul(x[..., some], y[..., some, :])
            total = total + product.astype(np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot

    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, source, target):
        narrows = source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16
        if not narrows:
            return plain_cast(self, source, target)
        bits = np.ascontiguousarray(source.data, np.float32).view(np.uint32)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = np.where(np.isnan(source.data), bits | 0x400000, even) >> 16
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = cast_impl

    plain_reduce = interpreter.ReduceOps.apply_impl

    def apply_impl(self, operands):
        if self.combine_fn.fn.__name__ != "_bitwise_or":
            return plain_reduce(self, operands)
        found = np.bitwise_or.reduce(operands[0].handle.data, axis=self.axis)
        return self.to_tensor(found, operands[0].dtype)

    interpreter.ReduceOps.apply_impl = apply_impl

    unwritten_floats = cycle((float("nan"), None))

    def fill_unwritten(allocate):
        """Let ``allocate`` fill by turns with NaN, which a product with zero keeps,
        and with the largest number, whose sums overflow; integers with a third of
        theirs.
        """

        def allocated(*args, **options):
            made = allocate(*args, **options)
            if not made.is_floating_point():
                is_bool = made.dtype == torch.bool
                return made.fill_(is_bool or torch.iinfo(made.dtype).max // 3)
            value = next(unwritten_floats)
            return made.fill_(torch.finfo(made.dtype).max if value is None else value)

        return allocated

    torch.empty = fill_unwritten(torch.empty)
    torch.empty_like = fill_unwritten(torch.empty_like)
    torch.Tensor.new_empty = fill_unwritten(torch.Tensor.new_empty)
