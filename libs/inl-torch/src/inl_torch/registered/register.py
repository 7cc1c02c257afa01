"""Registration of ops with ``torch.library``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake


def register(
    name: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    save: Callable[..., None],
    gradients: Callable[..., Any],
    batched: Callable[..., Any],
) -> Any:
    """Define an op that ``run`` computes on every device; return its overload.

    The schema follows from the annotations of ``run``, which must return new tensors.
    fake: computes contiguous results without values. save, gradients: as
    ``setup_context`` and ``backward`` of ``torch.library.register_autograd``. batched:
    as the function of ``torch.library.register_vmap``.
    """
    # torch.library.custom_op would search all results for aliases at each call.
    schema = torch.library.infer_schema(run, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", run)
    torch.library.register_fake(name, fake)
    torch.library.register_autograd(name, gradients, setup_context=save)
    torch.library.register_vmap(name, batched)
    space, _, op = name.partition("::")
    return getattr(getattr(torch.ops, space), op).default


def composable(
    op: Any,
    *,
    save: Callable[..., None],
    gradients: Callable[..., Any],
    batched: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function that calls an op, also under transforms of ``torch.func``.

    The derivatives that ``torch.library`` registers do not support these transforms;
    ``torch.autograd.Function`` does.
    """

    class Composed(torch.autograd.Function):
        forward = staticmethod(op)
        setup_context = staticmethod(save)
        backward = staticmethod(gradients)
        vmap = staticmethod(batched)

    # ``apply`` is untyped.
    apply: Callable[..., Any] = Composed.apply

    def call(*args: Any) -> Any:
        return apply(*args) if is_wrapped(*args) else op(*args)

    return call


def is_wrapped(*values: Any) -> bool:
    """Whether a transform of ``torch.func`` holds one of the values."""
    unwrap = getattr(torch.func, "debug_unwrap", None)
    # Older releases of torch have no such function; their transforms use the ops' own
    # rules.
    if unwrap is None or torch.compiler.is_compiling():
        return False
    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return any(unwrap(each, recurse=False) is not each for each in tensors)


def is_transformed(*values: Any) -> bool:
    """Whether ``torch.compile`` traces, or a value is held as in :func:`is_wrapped`.

    Of a call that the compiler puts into its graph as a whole, it traces the content
    with fake tensors while ``is_compiling`` is false.
    """
    if torch.compiler.is_compiling() or is_wrapped(*values):
        return True
    return any(is_fake(each) for each in values)
