"""Forks of this process: what a child must not share with its parent starts over.

An object that owns a pipe, socket, thread or lock registers itself with
:func:`on_fork`. In a forked child none of the parent's threads exist, a lock that one
of them held is never released, and every open descriptor is shared with the parent.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class ForkAware(Protocol):
    """An object that changes its state in a forked child."""

    def after_fork_in_child(self) -> None:
        """Drop resources shared with the parent; must not block or write to them."""


_registered: dict[int, weakref.ref[ForkAware]] = {}


def on_fork(each: ForkAware) -> None:
    """Call ``after_fork_in_child`` of an object in every forked child of this process.

    Children call it in the order of registration. The object is not kept alive.
    """
    key = id(each)
    _registered[key] = weakref.ref(each, lambda _: _registered.pop(key, None))


def disconnect(descriptor: int) -> None:
    """Replace a descriptor by the null device, in this process only.

    Objects that use the descriptor stay valid: what they flush or send when they are
    closed does not reach the parent, and closing them closes no descriptor twice.
    """
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def _notify_child() -> None:
    for reference in list(_registered.values()):
        each = reference()
        if each is not None:
            each.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_notify_child)
