"""Attention of torch and JAX: values, derivatives, and the size of its programs."""

from __future__ import annotations

import numpy as np
import pytest

from inl.kernels import flash_attention, gpu_kernel
from inl.spec.attention_pattern import AttentionPattern

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.extend.core import jaxprs_in_params  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

MAKE = {"numpy": np.asarray, "torch": torch.asarray, "jax": jnp.asarray}
L, S, SIZE = 37, 53, 16
RNG = np.random.default_rng(3)
BLOCKS = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], bool)
RANDOM = RNG.random((L, S)) < 0.3
RANDOM[5] = False
ADDED = RNG.standard_normal((3, L, S))
ADDED[:, 7], ADDED[0, :, 3], ADDED[1, 4, 9] = -np.inf, -np.inf, -2e30

DISTANCE = np.arange(L)[:, None] - np.arange(S)
SETTINGS = {
    "all": {}, "causal": {"causal": True}, "window": {"window": 9},
    "causal window": {"causal": True, "window": 9}, "narrow": {"window": 1},
    "blocks": {"block_mask": BLOCKS},
    "causal blocks": {"block_mask": BLOCKS, "causal": True},
    "scaled": {"scale": -0.7},
}  # fmt: skip
MASKS = {
    "none": None, "rows": RANDOM, "keys": RANDOM[:1], "one row": RANDOM[0],
    "queries": RANDOM[:, :1], "heads": RNG.random((3, 1, S)) < 0.5, "added": ADDED,
    "added to keys": ADDED[:, :1], "added to all": RNG.standard_normal((2, 3, L, 1)),
}  # fmt: skip


COMPILED = [
    ("all", "none"), ("causal", "added"), ("causal window", "rows"),
    ("blocks", "added to keys"), ("narrow", "queries"), ("scaled", "added to all"),
    ("window", "one row"), ("causal blocks", "heads"),
]  # fmt: skip
"""Settings and masks of JAX, which compiles each for seconds."""


def bias(shape, settings, mask=None):
    """What is added to the scores [L, S], -inf where a key is not seen."""
    length, keys = shape
    near = np.arange(length)[:, None] - np.arange(keys)
    if settings.get("causal"):
        near = near + keys - length
    hidden = np.zeros(shape, bool)
    if settings.get("causal"):
        hidden |= near < 0
    if "window" in settings:
        hidden |= np.abs(near) >= settings["window"]
    if "block_mask" in settings:
        tiles = np.kron(settings["block_mask"], np.ones((SIZE, SIZE), bool))
        hidden |= ~tiles[:length, :keys].astype(bool)
    added = np.where(hidden, -np.inf, 0)
    if mask is None:
        return added
    if mask.dtype == bool:
        return added + np.where(mask, 0, -np.inf)
    return added + np.where(mask <= -5e29, -np.inf, mask)


def expected(q, k, v, added, scale=None, gradient=None):
    """Attention in float64; with ``gradient`` the derivatives of q, k and v."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale = scale or q.shape[-1] ** -0.5
    scores = scale * q @ k.swapaxes(-1, -2) + added
    top = scores.max(-1, keepdims=True)
    odds = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = odds.sum(-1, keepdims=True)
    weights = odds / np.where(total > 0, total, 1)
    if gradient is None:
        return weights @ v
    of_weights = gradient @ v.swapaxes(-1, -2)
    mean = (weights * of_weights).sum(-1, keepdims=True)
    of_scores = scale * weights * (of_weights - mean)
    turned = weights.swapaxes(-1, -2) @ gradient
    return of_scores @ k, of_scores.swapaxes(-1, -2) @ q, turned


def operands(*lead, sizes=(L, S), width=8, value=5, dtype=np.float32):
    shapes = ((sizes[0], width), (sizes[1], width), (sizes[1], value))
    return [RNG.standard_normal((*lead, *shape)).astype(dtype) for shape in shapes]


def off(found, exact):
    return np.abs(np.asarray(found) - exact).max() / max(np.abs(exact).max(), 0.5)


def gradients(kind, q, k, v, weights, **settings):
    """Derivatives of q, k and v of the weighted sum of results."""
    if kind == "jax":

        def loss(*given):
            return (flash_attention(*given, **settings) * weights).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*map(jnp.asarray, (q, k, v)))
    given = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    loss = (flash_attention(*given, **settings) * torch.asarray(weights)).sum()
    return torch.autograd.grad(loss, given)


CASES = [
    (kind, name, mask)
    for kind in MAKE for name in SETTINGS for mask in MASKS
    if kind != "jax" or (name, mask) in COMPILED
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "mask"), CASES)
def test_values_and_gradients(kind, name, mask):
    given, settings, shown = operands(2, 3), SETTINGS[name], MASKS[mask]
    added = bias((L, S), settings, shown)
    scale = settings.get("scale")
    made = shown
    if shown is not None:
        made = MAKE[kind](shown if shown.dtype == bool else shown.astype(np.float32))
    options = {**settings, "mask": made, "block_size": SIZE}
    found = flash_attention(*map(MAKE[kind], given), **options)
    exact = expected(*given, added, scale)
    assert off(found, exact) < 2e-6
    unseen = np.broadcast_to(np.isneginf(added).all(-1)[..., None], exact.shape)
    assert not np.asarray(found)[unseen].any()
    if kind == "numpy":
        return
    weights = RNG.standard_normal(exact.shape).astype(np.float32)
    wanted = expected(*given, added, scale, weights)
    for part, right in zip(gradients(kind, *given, weights, **options), wanted,
                           strict=True):  # fmt: skip
        assert off(part, right) < 5e-6


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 40), (16, 16), (33, 33), (40, 7), (7, 40), (64, 48)]
)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_shapes(kind, sizes, lead):
    if kind == "jax" and (len(lead) in (1, 3) or sizes[0] == 16):
        pytest.skip("compiles for seconds")
    given = operands(*lead, sizes=sizes)
    made = [MAKE[kind](x) for x in given]
    for settings in ({}, {"causal": True}, {"causal": True, "window": 5}):
        found = flash_attention(*made, **settings, block_size=SIZE)
        assert tuple(found.shape) == (*lead, sizes[0], 5)
        assert off(found, expected(*given, bias(sizes, settings))) < 2e-6


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(kind, dtype):
    """Half types have one rounding, that of the result."""
    if dtype == "bfloat16" and kind == "numpy":
        pytest.skip("NumPy has none")
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else None
    if dtype == "float64" and kind == "jax" and enable is None:
        pytest.skip("needs jax.enable_x64")
    given = operands(2, dtype=np.float64)
    if dtype != "float64":
        narrow = getattr(torch, dtype)
        given = [torch.asarray(x).to(narrow).double().numpy() for x in given]

    def run():
        made = [MAKE[kind](x) for x in given]
        cast = {"torch": lambda x: x.to(getattr(torch, dtype))}
        made = [cast.get(kind, lambda x: x.astype(dtype))(x) for x in made]
        found = flash_attention(*made, causal=True, block_size=SIZE)
        assert str(found.dtype).rpartition(".")[2] == dtype
        wide = found.double() if kind == "torch" else np.asarray(found, np.float64)
        return np.asarray(wide)

    if dtype == "float64" and kind == "jax":
        with enable(True):
            found = run()
    else:
        found = run()
    exact = expected(*given, bias((L, S), {"causal": True}))
    if dtype == "float64":
        assert off(found, exact) < 1e-14
        return
    nearest = torch.asarray(exact).to(narrow).double().numpy()
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert (np.abs(found - nearest) <= 2 * unit * np.abs(exact) + 1e-6).all()
    assert (found != nearest).mean() < 0.01


class Counting(TorchDispatchMode):
    """Counts the functions that torch calls, and the elements of their results."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls += 1
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and each.dtype != torch.bool:
                self.largest = max(self.largest, each.numel())
        return result


def program_size(kind, length, **settings):
    """Size of the program of loss and derivatives; elements of its largest array."""
    weights = np.ones((1, length, 8), np.float32)
    given = operands(1, sizes=(length, length), value=8)
    if kind == "torch":
        with Counting() as counting:
            gradients(kind, *given, weights, **settings)
        return counting.calls, counting.largest

    def loss(*given):
        return (flash_attention(*given, **settings) * weights).sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*given)
    sizes = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(np.prod(x.aval.shape, dtype=int) for x in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(program.jaxpr)
    return len(sizes), max(sizes)


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": True}, {"window": 40}, {"causal": True, "window": 40}],
    ids=str,
)
def test_a_program_does_not_grow_with_the_length(kind, settings):
    settings = {**settings, "block_size": 32}
    (first, _), (second, largest) = (
        program_size(kind, length, **settings) for length in (512, 2048)
    )
    assert first == second
    # The inputs have 2048 * 8 elements; all scores would have 2048 * 2048.
    assert largest < 2048 * 2048 / 8


def test_a_random_block_mask_takes_few_calls():
    counts = []
    for length in (512, 2048):
        tiles = np.random.default_rng(0).random((length // 32, length // 32)) < 0.2
        counts.append(program_size("torch", length, block_mask=tiles, block_size=32)[0])
    # One call for each power of two of the tiles of a row.
    assert counts[1] < 2 * counts[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_torch_differentiates_twice(name):
    settings = {**SETTINGS[name], "block_size": SIZE}
    given = [
        torch.tensor(x, requires_grad=True)
        for x in operands(sizes=(L, S), width=2, value=2, dtype=np.float64)
    ]

    def call(*given):
        return flash_attention(*given, **settings)

    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


# torch imports deprecated parts of itself for its transforms.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_transforms():
    given = [torch.tensor(x) for x in operands(4, dtype=np.float64)]
    exact = expected(*(x.numpy() for x in given), bias((L, S), {"causal": True}))

    def call(*given):
        return flash_attention(*given, causal=True)

    assert off(torch.func.vmap(call)(*given), exact) < 1e-14
    tangents = [torch.randn_like(x) for x in given]
    _, slope = torch.func.jvp(call, tuple(given), tuple(tangents))
    step = 1e-6
    ends = [
        call(*(x + sign * step * t for x, t in zip(given, tangents, strict=True)))
        for sign in (1, -1)
    ]
    assert off(slope, ((ends[0] - ends[1]) / (2 * step)).numpy()) < 1e-7
    gradient = torch.func.grad(lambda q: call(q, *given[1:]).sum())(given[0])
    right, *_ = expected(*(x.numpy() for x in given), bias((L, S), {"causal": True}),
                         gradient=np.ones_like(exact))  # fmt: skip
    assert off(gradient, right) < 1e-13


def test_jax_transforms():
    given = [jnp.asarray(x) for x in operands(4)]
    added = bias((L, S), {"causal": True})
    exact = expected(*map(np.asarray, given), added)

    def call(*given):
        return flash_attention(*given, causal=True, block_size=SIZE)

    assert off(jax.vmap(call)(*given), exact) < 2e-6
    tangents = [jnp.asarray(RNG.standard_normal(x.shape), x.dtype) for x in given]
    _, slope = jax.jvp(call, given, tangents)
    weights = RNG.standard_normal(exact.shape)
    parts = expected(*map(np.asarray, given), added, gradient=weights)
    right = sum((g * np.asarray(t)).sum() for g, t in zip(parts, tangents, strict=True))
    assert abs((np.asarray(slope) * weights).sum() / right - 1) < 1e-4
    small = [x[0, :3, :2] for x in given]

    def loss(q):
        found = flash_attention(q, *small[1:], causal=True, block_size=2)
        return (found**2).sum()

    forward, backward = (
        jax.hessian(loss)(small[0]),
        jax.jacrev(jax.grad(loss))(small[0]),
    )
    plain = jax.hessian(
        lambda q: (
            flash_attention(q, *small[1:], causal=True, use_flash=False) ** 2
        ).sum()
    )(small[0])
    assert off(forward, np.asarray(plain)) < 1e-4
    assert off(backward, np.asarray(plain)) < 1e-4


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_the_derivative_of_an_added_mask(kind):
    q, k, v = operands(2, 3)
    added = RNG.standard_normal((3, L, S)).astype(np.float32)
    weights = RNG.standard_normal((2, 3, L, 5)).astype(np.float32)

    def loss(mask, xp):
        given = [xp.asarray(x) for x in (q, k, v)]
        found = flash_attention(*given, mask=mask, window=20, block_size=SIZE)
        return (found * xp.asarray(weights)).sum()

    if kind == "jax":
        found = jax.grad(loss)(jnp.asarray(added), jnp)
    else:
        mask = torch.tensor(added, requires_grad=True)
        (found,) = torch.autograd.grad(loss(mask, torch), mask)
    way = RNG.standard_normal(added.shape)

    def moved(step):
        shown = bias((L, S), {"window": 20}, added.astype(np.float64) + step * way)
        return (expected(q, k, v, shown) * weights).sum()

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert abs((np.asarray(found) * way).sum() / slope - 1) < 1e-4


@pytest.mark.parametrize(
    "pattern",
    [(37, 53, 16), (53, 37, 16, True), (40, 40, 8, True, 9), (64, 48, 16, False, 3),
     (5, 90, 4, True, 1), (33, 33, 16, False, 40)],
    ids=str,
)  # fmt: skip
def test_tiles_are_those_of_the_positions(pattern):
    pattern = AttentionPattern(*pattern)
    near = np.arange(pattern.length)[:, None] + pattern.offset - np.arange(pattern.keys)
    seen = np.ones(near.shape, bool)
    if pattern.causal:
        seen &= near >= 0
    if pattern.window is not None:
        seen &= np.abs(near) < pattern.window
    tiles = pattern.tiles()
    for row in range(pattern.rows):
        for column in range(pattern.columns):
            size = pattern.size
            part = seen[row * size :, column * size :][:size, :size]
            assert tiles.wanted[row, column] == part.any()
            assert tiles.whole[row, column] == part.all()


# torch imports deprecated parts of itself to compile.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("settings", [{"causal": True}, {"window": 9}], ids=str)
def test_torch_compiles_it(settings):
    given = operands(2, sizes=(L, L))
    compiled = torch.compile(flash_attention, backend="eager")
    made = [torch.tensor(x, requires_grad=True) for x in given]
    found = compiled(*made, **settings, block_size=SIZE)
    assert off(found.detach(), expected(*given, bias((L, L), settings))) < 2e-6
    found.sum().backward()
    right = expected(*given, bias((L, L), settings), gradient=np.ones(found.shape))
    for each, exact in zip(made, right, strict=True):
        assert off(each.grad, exact) < 5e-6


def test_half_precision_of_a_decorated_kernel():
    """Inputs are rounded, sums are not."""

    @gpu_kernel(use_fp16=True, auto_optimize=False)
    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True)

    given = operands(2)
    narrow = [x.astype(np.float16) for x in given]
    exact = expected(*narrow, bias((L, S), {"causal": True}))
    for kind, make in MAKE.items():
        assert off(attend(*map(make, given)), exact) < 1e-6, kind
