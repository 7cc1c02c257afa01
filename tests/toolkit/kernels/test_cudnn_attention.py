"""JAX's attention by a fused kernel: by what it calls, on XLA's formula of it."""

from __future__ import annotations

import numpy as np
import pytest

from inl.kernels import flash_attention

jax = pytest.importorskip("jax")
jnp = jax.numpy

from inl_jax.xla import cudnn_attention, tiled_attention  # noqa: E402

RNG = np.random.default_rng(11)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the kernel; a CPU computes them as XLA does."""
    found = []
    true = cudnn_attention._fused

    def fused(q, k, v, **settings):
        found.append((q.shape, k.shape, settings))
        # XLA on a CPU has no sums in float32 of products of float16.
        wide = (each.astype(jnp.float32) for each in (q, k, v))
        return true(*wide, **settings).astype(q.dtype)

    monkeypatch.setattr(cudnn_attention, "LIBRARY", "xla")
    monkeypatch.setattr(cudnn_attention, "missing", lambda: "")
    monkeypatch.setattr(cudnn_attention, "_fused", fused)
    monkeypatch.setattr(cudnn_attention, "on_gpu", lambda _: True)
    monkeypatch.setattr(tiled_attention, "LARGE_TILE", 16)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return found


def operands(heads, groups, *lead, length=48, keys=48, dtype="float16"):
    shapes = (*lead, heads, length, 16), *2 * [(*lead, groups, keys, 16)]
    return [jnp.asarray(RNG.standard_normal(shape), dtype) for shape in shapes]


def exact(q, k, v, causal=False, window=None):
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    k, v = (each.repeat(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
    far = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])
    seen = (far >= 0) | (not causal)
    seen &= far < (window or far.size)
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / 4, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize(
    ("lead", "groups", "settings"),
    [
        ((), 1, {}),
        ((2,), 4, {"causal": True}),
        ((2, 3), 2, {"causal": True, "window": 7}),
        ((2, 3), 2, {"causal": True, "window": 48}),
    ],
    ids=str,
)
def test_values(calls, lead, groups, settings):
    given = operands(4, groups, *lead)
    found = flash_attention(*given, **settings)
    right = exact(*given, **settings)
    assert found.dtype == jnp.float16
    assert found.shape == right.shape
    assert np.abs(np.asarray(found, np.float64) - right).max() < 2e-3
    (((batch, *_), of_keys, used),) = calls
    assert batch == np.prod(lead, dtype=int)
    assert of_keys[2] == groups  # grouped heads are not copied
    assert used["causal"] is ("causal" in settings)
    assert used["window"] == (7 if settings.get("window") == 7 else None)


def test_derivatives_in_every_mode_are_those_of_tiles(calls, monkeypatch):
    given = operands(4, 2, 1, length=16, keys=16)
    weights = RNG.standard_normal(given[0].shape)
    slopes = [jnp.asarray(RNG.standard_normal(x.shape), x.dtype) for x in given]

    def loss(*given):
        found = flash_attention(*given, causal=True)
        return (found.astype(jnp.float32) * weights).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*given)
    _, slope = jax.jvp(loss, given, slopes)
    twice = jax.jit(jax.grad(lambda q, *x: jax.grad(loss)(q, *x).sum()))
    second = twice(*given)
    each = jax.vmap(lambda *x: flash_attention(*x, causal=True))(*given)
    assert (
        np.abs(np.asarray(each, np.float64) - exact(*given, causal=True)).max() < 2e-3
    )
    assert calls

    monkeypatch.setattr(cudnn_attention, "missing", lambda: "not here")
    wide = [x.astype(jnp.float32) for x in given]
    for part, right in zip(
        found, jax.jit(jax.grad(loss, (0, 1, 2)))(*wide), strict=True
    ):
        assert np.abs(part.astype(jnp.float32) - right).max() < 2e-2
    _, right = jax.jvp(loss, wide, [x.astype(jnp.float32) for x in slopes])
    assert abs(slope - right) < 2e-2 * abs(right) + 0.2
    right = jax.jit(jax.grad(lambda q, *x: jax.grad(loss)(q, *x).sum()))(*wide)
    assert np.abs(second.astype(jnp.float32) - right).max() < 5e-2


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"causal": True}, {"length": 16}),
        ({"window": 7}, {}),
        ({"mask": np.ones((48, 48), bool)}, {}),
        ({"block_mask": np.ones((3, 3), bool), "block_size": 16}, {}),
        ({"causal": True}, {"dtype": "float32"}),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_compute_is_computed_by_tiles(calls, settings, sizes):
    given = operands(2, 2, **sizes)
    found = flash_attention(*given, **settings)
    assert np.isfinite(np.asarray(found, np.float32)).all()
    assert not calls


def test_a_device_without_the_kernel_says_so(monkeypatch, caplog):
    def refused(*_, **__):
        raise RuntimeError("cuDNN is not detected.")

    cudnn_attention.missing.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn_attention, "_fused", refused)
    try:
        assert "not detected" in cudnn_attention.missing()
        assert "computed by tiles" in caplog.text
    finally:
        cudnn_attention.missing.cache_clear()
