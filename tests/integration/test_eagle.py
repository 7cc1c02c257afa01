"""EAGLE-3 heads change no output of the backend on ``jax.jit``."""

from __future__ import annotations

from eagle_heads import PLAIN_REQUESTS, assert_backend_drafts
from inl.backend.reference import ReferenceBackend
from inl.device import Device


def test_a_head_changes_no_output(jax_module, tmp_path):
    # Few programs of one sampler, since each takes seconds to compile.
    backend = jax_module.jax_backend()(Device("jax:0"))
    plain = ReferenceBackend(Device("reference"))
    settings = {"plain": plain, "max_batch": 1, "sampling": "sample"}
    assert_backend_drafts(backend, tmp_path, PLAIN_REQUESTS[:2], **settings)
