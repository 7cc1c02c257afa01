"""``inl.functional.moe`` on torch tensors, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl.errors import RequestError
from inl.functional import moe
from inl.ops.moe_cases import matrices


@pytest.fixture
def given(seed):
    rng = np.random.default_rng(seed)
    arrays = rng.standard_normal((18, 8)), rng.standard_normal((18, 4))
    return [a.astype(np.float32) for a in (*arrays, *matrices(rng, 4, 6, 8))]


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_a_tensor_in_is_a_tensor_out(factor, given):
    x, logits, *weights = map(torch.from_numpy, given)
    found = moe.moe_dispatch(x, logits, tuple(weights), capacity_factor=factor)
    wanted = moe.moe_dispatch(
        given[0], given[1], tuple(given[2:]), capacity_factor=factor
    )
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)


def dense(x, logits, gate, up, down, kept):
    """All experts for all tokens, with weight 0 for unselected experts."""
    odds = logits.softmax(-1) * kept
    odds = odds / odds.sum(-1, keepdim=True).clamp(min=1e-20)
    inner = torch.nn.functional.silu(torch.einsum("th,eih->tei", x, gate))
    inner = inner * torch.einsum("th,eih->tei", x, up)
    return torch.einsum("tei,ehi,te->th", inner, down, odds)


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_gradients_are_those_of_a_dense_computation(factor, given, seed):
    sent = moe.capacity(moe.route(given[1], k=2), 4, capacity_factor=factor)
    kept = np.zeros((18, 4), np.float32)
    np.put_along_axis(kept, sent.ids.astype(int), np.sign(sent.weights), 1)
    assert (kept.sum() < 36) == (factor < 1)
    grads = []
    for compute in (
        lambda x, logits, *w: moe.moe_dispatch(x, logits, w, capacity_factor=factor),
        lambda *args: dense(*args, torch.from_numpy(kept)),
    ):
        inputs = [torch.tensor(array, requires_grad=True) for array in given]
        y = compute(*inputs)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        grads.append([one.grad for one in inputs])
    for found, wanted in zip(*grads, strict=True):
        assert wanted.abs().max() > 1e-3
        size = float(wanted.abs().max())
        assert float((found - wanted).abs().max()) < 1e-5 * size, f"seed {seed}"


def test_nan_is_refused():
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    with pytest.raises(RequestError, match="found NaN in row 1"):
        moe.route(logits, k=2)
