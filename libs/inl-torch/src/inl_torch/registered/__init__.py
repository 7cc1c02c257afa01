"""Ops of ``torch.ops.inl``, registered with ``torch.library``.

Each op has fake tensors, a derivative that is differentiable itself, and a rule for
``torch.func.vmap``. They are used in eager mode; see :mod:`inl_torch.functional`.
"""
