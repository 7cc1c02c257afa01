"""Every op of the catalog on eager torch, against its float64 body."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl.ops import catalog
from inl.spec.dispatch import DynamicOps
from inl.spec.tolerance import judge
from inl.spec.tree import leaves
from inl.testing.edge_cases import edge_cases
from inl_torch import eager
from inl_torch.eager import attention

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = tuple(eager.kernels())
LABELS = attention.LABEL, attention.SINK_LABEL
PRIMITIVES = sorted(name for name, spec in catalog().items() if not spec.composite)


def test_every_primitive_op_has_a_kernel():
    assert set(PRIMITIVES) <= {kernel.op for kernel in KERNELS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(catalog()))
def test_eager_errs_no_more_than_rounding(name, dtype, seed, on_torch, on_host):
    spec = catalog()[name]
    for case in spec.cases(np.random.default_rng(seed)):
        arguments = on_torch(spec, case, dtype)
        run = getattr(DynamicOps(KERNELS), name)
        consumed = [
            leaf.data_ptr()
            for parameter, argument in zip(spec.parameters, arguments, strict=True)
            if parameter in spec.consumes
            for leaf in leaves(argument)
        ]
        result = run(*arguments, **case.attrs)
        verdict = judge(spec, case, dtype, on_host(result))
        where = f"{name}/{case.name} in {dtype}, seed {seed}"
        assert verdict.passed, f"{where}: {verdict}"
        given = {leaf.data_ptr() for leaf in leaves(result)}
        assert given.issuperset(consumed), f"{where}: state moved"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["attention", "attend", "sink_attention"])
def test_static_attention_errs_no_more(name, dtype, seed, on_torch, on_host):
    spec = catalog()[name]
    edges = edge_cases(spec, np.random.default_rng(seed), 4)
    # Scores beyond the range of float16, also of keys that are masked.
    loud = [case for case in edges if case.name.endswith("scores of 100,000")]
    assert loud or name == "attend"
    for case in (*spec.cases(np.random.default_rng(seed)), *loud):
        arguments = on_torch(spec, case, dtype)
        named = dict(zip(spec.parameters, arguments, strict=True))
        size = named["cache"].k.shape[1]
        plan = attention.static_plan(named["step"], block_size=size)
        named["step"] = named["step"]._replace(plan=dict.fromkeys(LABELS, plan))
        result = getattr(DynamicOps(KERNELS), name)(*named.values(), **case.attrs)
        verdict = judge(spec, case, dtype, on_host(result))
        assert verdict.passed, f"{case.name} in {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("name", PRIMITIVES)
def test_no_kernel_synchronizes(name, seed, on_torch):
    """Meta tensors have no data, so reading it, or shapes that depend on it, raise."""
    spec = catalog()[name]
    for case in spec.cases(np.random.default_rng(seed)):
        host = on_torch(spec, case, "float32")
        expected = spec.shapes(*host, **case.attrs)
        arguments = on_torch(spec, case, "float32", "meta")
        result = getattr(DynamicOps(KERNELS), name)(*arguments, **case.attrs)
        shapes = [tuple(leaf.shape) for leaf in leaves(result)]
        assert shapes == [tuple(leaf.shape) for leaf in leaves(expected)], case.name


def test_the_meta_check_can_fail():
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(3, device="meta").sum().item()


def wrong_scale(x, w, *, eps):
    # 2 % is a few units in the last place of bfloat16.
    factor = 1.02
    return factor * eager.norm.rms_norm(x, w, eps=eps)


def wrong_position(positions, **attrs):
    return eager.rope.rope_table(positions + 1, **attrs)


def wrong_mask(q, cache, step, **attrs):
    return eager.attention.attention(
        q, cache, step._replace(positions=step.positions + 1, plan=()), **attrs
    )


def wrong_order(k, v, cache, writes):
    return eager.cache.write_kv(v, k, cache, writes)


def wrong_tie(logits, step, tables, *, sampler):
    turned = logits.flip(-1)
    tokens, tables = eager.sample.sample(turned, step, tables, sampler=sampler)
    return logits.shape[-1] - 1 - tokens, tables


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("rms_norm", wrong_scale),
        ("rope_table", wrong_position),
        ("attention", wrong_mask),
        ("write_kv", wrong_order),
        ("sample", wrong_tie),
    ],
)
def test_a_wrong_kernel_is_found(name, kernel, dtype, seed, on_torch, on_host):
    spec = catalog()[name]
    verdicts = []
    for case in spec.cases(np.random.default_rng(seed)):
        result = kernel(*on_torch(spec, case, dtype), **case.attrs)
        verdicts.append(judge(spec, case, dtype, on_host(result)).passed)
    assert not all(verdicts), f"seed {seed}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["linear", "rms_norm", "rope", "attention"])
def test_an_error_just_over_the_bound_is_found(name, dtype, seed, on_torch, on_host):
    spec = catalog()[name]
    run = getattr(DynamicOps(KERNELS), name)
    tried = 0
    for case in spec.cases(np.random.default_rng(seed)):
        result = on_host(run(*on_torch(spec, case, dtype), **case.attrs))
        verdict = judge(spec, case, dtype, result)
        if verdict.bound:
            shift = verdict.error + 1.5 * verdict.bound
            moved = [leaf + np.float32(shift) for leaf in leaves(result)]
            assert not judge(spec, case, dtype, moved).passed, (
                f"{case.name}, seed {seed}"
            )
            tried += 1
    assert tried > 2
