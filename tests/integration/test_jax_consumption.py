"""``inl check`` finds ``jax.jit`` programs that keep or copy their cache."""

from __future__ import annotations

import pytest

from planted_programs import keeping, report


@pytest.mark.full
def test_donated_caches_pass_although_they_are_kept(jax_module):
    def keep(function, bucket, consumes):
        return keeping(jax_module.jit(function, bucket, consumes))

    assert report(jax_module.jax_backend(compile=keep)).message == ""


def test_a_program_without_donation_is_found(jax_module):
    def undonated(function, bucket, consumes):
        return jax_module.jit(function, bucket, ())

    result = report(jax_module.jax_backend(compile=undonated))
    assert "copies the cache that it consumes" in result.message


@pytest.mark.full
def test_a_kept_cache_is_found(jax_module):
    def keep(function, bucket, consumes):
        return keeping(jax_module.jit(function, bucket, ()))

    result = report(jax_module.jax_backend(compile=keep))
    assert "can be read after the step that has consumed it" in result.message
