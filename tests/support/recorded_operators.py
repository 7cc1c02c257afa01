"""Records the aten operators that a computation dispatches."""

from __future__ import annotations

from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

IMPLICIT = DispatchKey.CompositeImplicitAutograd


class Recorder(TorchDispatchMode):
    """Names in ``seen``; a composite that every device decomposes counts as its parts.

    Its own name is in ``composites``.
    """

    def __init__(self):
        super().__init__()
        self.seen, self.composites = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.name().removeprefix("aten::"), kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            self.composites.add(name)
            return parts
        self.seen.add(name)
        return func(*args, **kwargs)
