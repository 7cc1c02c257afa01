"""Selection of a kernel as for a traced call."""

from __future__ import annotations


def selected(kernels, op, args, attrs):
    """Return the kernel with the highest preference that does not refuse a call."""
    accepted = [k for k in kernels if k.op == op and not k.refuse(*args, **attrs)]
    return max(accepted, key=lambda k: k.preference)
