"""Faulty ranks for ``test_collectives.py``."""

from __future__ import annotations

import torch

from inl.runners.rank_startup import serve_rank
from inl_torch.memory import translate_oom

TORCH_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more."
LARGE = 12
"""Tokens of a step that runs out of memory."""


def full(options, progress):
    """A rank that runs out of memory in large steps."""
    served = serve_rank(options, progress)
    runner = served.runner
    plain = runner.executor.program

    def program(name, bucket, *width):
        if bucket.tokens < LARGE:
            return plain(name, bucket, *width)
        return translate_oom(fail, "cpu:0: step", runner._backend.memory)

    runner.executor.program = program
    return served


def fail(*_):
    raise torch.cuda.OutOfMemoryError(TORCH_SAYS)
