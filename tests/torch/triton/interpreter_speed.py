"""Fewer steps of Triton's interpreter for the same values.

Most of its time goes to the types of its tensors, not to NumPy. It also computes each
sum and product of 32-bit integers again in 64 bits, to compare the result with the
limits, and drops the comparison, since its option ``debug`` is off.
"""

from __future__ import annotations

from types import NoneType

import triton.language as tl
from triton.runtime import interpreter

core = tl.core
NO_SHAPE = (core.constexpr(1), core.tuple([]))
SELF = (int, bool, float, str, NoneType, core.tensor, core.dtype)
"""Types of which no value is or holds a ``constexpr``."""

plain_unwrap = core._unwrap_if_constexpr
plain_block = core.block_type.__init__
plain_equal = core.dtype.__eq__
blocks, names = {}, {}


def unwrap(value):
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in SELF else plain_unwrap(value)


def is_equal(self, other):
    return self is other or plain_equal(self, other)


def new_block(self, element_ty, shape):
    """Set the fields of a ``block_type``; its checks run once for a shape."""
    key = tuple(unwrap(size) for size in shape)
    if key not in blocks:
        plain_block(self, element_ty, shape)
        sizes = core.tuple([core.constexpr(size) for size in key])
        blocks[key] = self.shape, self.numel, (core.constexpr(self.numel), sizes)
    self.element_ty = element_ty
    self.shape, self.numel, self.constants = blocks[key]
    named = key, element_ty.name
    if named not in names:
        names[named] = f"<{self.shape}, {element_ty}>"
    self.name = names[named]


def new_tensor(self, handle, kind):
    """Set the fields of a ``tensor``; those of one shape share its constants."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = kind.constants if kind.is_block() else NO_SHAPE


def new_handle(self, data, dtype, attr=None):
    """Set the fields of a ``TensorHandle`` without a comparison of dtypes."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def patch_member(owner, name, member, _builder, scope):
    """Let a function of the language take the interpreter's semantics."""

    def called(*args, **options):
        options["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **options)

    scope.set_attr(owner, name, called)


def apply():
    """Replace the functions of Triton for the rest of the process."""
    core._unwrap_if_constexpr = unwrap
    core.dtype.__eq__ = is_equal
    core.block_type.__init__ = new_block
    core.tensor.__init__ = new_tensor
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    interpreter.TensorHandle.__init__ = new_handle
    interpreter._patch_attr = patch_member
