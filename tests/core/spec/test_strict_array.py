"""Operations that models may use, and errors of all others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.errors import KernelFailed, NoKernel
from inl.executor.tracing import trace
from inl.models.llama import MODEL
from inl.spec.dispatch import ResolvedOps
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.strict_array import StrictArray
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.weights.plan import plan_weights

DEVICE = Device("reference:0")
LIMITS = Limits(slots=4, blocks=(20,), block_size=4, max_blocks_per_seq=6, vocab=96)
BUCKET = Bucket(8, 3, sampler="sample")
LAYERS = 3


def traced(model, *, ranks=1, bucket=BUCKET):
    hf, _ = tiny_llama(np.random.default_rng(0), layers=LAYERS, kv_heads=4, bias=True)
    config = model.config(hf)
    kernels = tuple(ReferenceBackend(DEVICE).kernels())
    groups = plan_weights(model.weights(config), kernels, {}, ranks=ranks)
    return trace(
        model, config, groups, bucket, LIMITS, KernelSelection(kernels), ranks=ranks
    )


def test_the_llama_runs_on_shapes_alone():
    tracer = traced(MODEL)
    calls = {}
    for (name, _), count in tracer.counts.items():
        calls[name] = calls.get(name, 0) + count
    assert calls["attention"] == calls["write_kv"] == calls["rope"] == LAYERS
    assert calls["linear"] == LAYERS * 7 + 1
    assert calls["rms_norm"] == 2 * LAYERS + 1
    assert calls["rope_table"] == calls["make_step"] == calls["sample"] == 1
    assert {choice.how for c in tracer.choices.values() for choice in c.values()} == {
        "native",
        "composed",
    }


@pytest.mark.parametrize(("ranks", "columns"), [(1, 96), (2, 48), (4, 24)])
def test_logits_have_one_row_per_sample(ranks, columns):
    seen = []

    def head(*args):
        seen.append(MODEL.head(*args))
        return seen[-1]

    traced(dataclasses.replace(MODEL, head=head), ranks=ranks, bucket=Bucket(9, 3, 2))
    # Shapes are those of one rank: only the backend knows the gathered size.
    assert [(x.shape, x.dtype) for x in seen] == [((6, columns), "float32")]


def branches(carry, ops):
    return carry._replace(delta=carry.residual) if carry.residual else carry


def compares(carry, ops):
    return carry._replace() if carry.residual[0, 0] > 0 else carry


def adds_in_place(carry, ops):
    residual = carry.residual
    residual += carry.delta
    return carry._replace(residual=residual)


def multiplies_in_place(carry, ops):
    residual = carry.residual
    residual *= 2
    return carry._replace(residual=residual)


def writes(carry, ops):
    carry.residual[0] = 0
    return carry


def loops(carry, ops):
    return carry._replace(delta=sum(2 * row for row in carry.residual))


def measures(carry, ops):
    return carry._replace() if len(carry.residual) else carry


def reads(carry, ops):
    return carry._replace(residual=carry.residual * float(carry.delta[0, 0]))


def gathers(carry, ops):
    return carry._replace(residual=carry.residual[carry.delta])


def reshapes_by_data(carry, ops):
    return carry._replace(residual=carry.residual.reshape(carry.delta, 4))


def mixes_dtypes(carry, ops):
    half = StrictArray(carry.residual.shape, "bfloat16")
    return carry._replace(residual=carry.residual + half)


def misfits(carry, ops):
    return carry._replace(residual=carry.residual + carry.cos)


def divides(carry, ops):
    return carry._replace(residual=carry.residual / 2)


def computes_in_numpy(carry, ops):
    return carry._replace(residual=np.exp(carry.residual))


def calls_an_unknown_op(carry, ops):
    return carry._replace(residual=ops.flash_attention(carry.residual))


REFUSED = {
    branches: (TypeError, r"float32\[8, 48\]: models must not branch on tensor data"),
    compares: (TypeError, "'>' not supported"),
    adds_in_place: (
        TypeError,
        "in-place operators are not supported; return new tensors",
    ),
    multiplies_in_place: (TypeError, "in-place operators are not supported"),
    writes: (TypeError, "does not support item assignment"),
    loops: (TypeError, r"float32\[8, 48\]: models must not iterate over a tensor"),
    measures: (TypeError, r"float32\[8, 48\]: len\(\) is not supported; use \.shape"),
    reads: (TypeError, "float"),
    gathers: (TypeError, r"only static ints and slices are supported"),
    reshapes_by_data: (TypeError, "sizes must be static ints"),
    mixes_dtypes: (TypeError, r"dtypes differ: float32\[8, 48\] and bfloat16\[8, 48\]"),
    misfits: (ValueError, r"do not broadcast: float32\[8, 48\] and float32\[8, 4\]"),
    divides: (TypeError, "unsupported operand"),
    computes_in_numpy: (TypeError, "ufunc|has no data|exp"),
    calls_an_unknown_op: (AttributeError, "no op 'flash_attention'; the catalog has"),
}


@pytest.mark.parametrize("does", REFUSED, ids=lambda does: does.__name__)
def test_unsupported_operations_raise(does):
    def layer(ops, c, w, carry, step, state, *, index):
        return MODEL.layer(ops, c, w, does(carry, ops), step, state, index=index)

    kind, sentence = REFUSED[does]
    with pytest.raises(kind, match=sentence):
        traced(dataclasses.replace(MODEL, layer=layer))


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (0, (6, 5)),
        (-1, (6, 5)),
        (slice(1, 3), (2, 6, 5)),
        ((slice(None), slice(None, None, 2)), (4, 3, 5)),
        ((..., 2), (4, 6)),
        ((1, ..., slice(-2, None)), (6, 2)),
    ],
)
def test_static_slices_have_the_shapes_of_numpy(key, shape):
    assert np.zeros((4, 6, 5))[key].shape == shape
    assert StrictArray((4, 6, 5), "float32")[key].shape == shape


@pytest.mark.parametrize("key", [4, -5, (0, 0, 0, 0)])
def test_an_index_out_of_range_raises(key):
    with pytest.raises(IndexError, match=r"float32\[4, 6, 5\]"):
        StrictArray((4, 6, 5), "float32")[key]


@pytest.mark.parametrize("shape", [(7, -1), (-1, -1), (3, 5), (0, -1)])
def test_a_reshape_of_another_size_raises(shape):
    with pytest.raises(ValueError, match="cannot be reshaped"):
        StrictArray((4, 6), "float32").reshape(*shape)


def logits_of(model):
    """Logits of the fourth token, after a step that caches the first three."""
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(0)))
    runner = local_runner(ReferenceBackend(DEVICE), model, files, LIMITS)
    runner.submit(
        admit_frame(1, [[3, 5]], groups=1, max_blocks_per_seq=LIMITS.max_blocks_per_seq)
    )
    for ids in ([4, 5, 6], [7]):
        frame = step_frame(
            Bucket(len(ids), 1), [Row(1, ids)], step=1, groups=1, block_size=4,
            decode_rows=0,
        )  # fmt: skip
        logits = runner.logits(frame).data
    return logits


def test_using_a_consumed_cache_raises():
    """On a backend that donates buffers, this model would read freed memory."""

    def layer(ops, c, w, carry, step, state, *, index):
        _, fresh = MODEL.layer(ops, c, w, carry, step, state, index=index)
        again, _ = MODEL.layer(ops, c, w, carry, step, state, index=index)
        return again, fresh

    assert np.isfinite(logits_of(MODEL)).all()
    with pytest.raises(
        KernelFailed, match="write_kv: argument 'cache' was already consumed"
    ):
        logits_of(dataclasses.replace(MODEL, layer=layer))


def test_writing_to_a_consumed_buffer_raises():
    backend = ReferenceBackend(DEVICE)
    state = backend.state(
        MODEL.state(MODEL.config(tiny_llama(np.random.default_rng(0))[0])),
        limits=LIMITS,
    )
    run = {kernel.op: kernel.run for kernel in backend.kernels()}
    cache = state.caches[0]
    k = np.ones((1, 8, 8), np.float32)
    fresh = run["write_kv"](k, k, cache, np.array([4], np.int32))
    assert np.isnan(cache.k).all()
    assert np.isnan(cache.v).all()
    with pytest.raises(ValueError, match="read-only"):
        cache.k[0] = 0
    assert fresh.k.sum() == k.sum()
    assert fresh.k[1, 0].sum() == k.sum()


def test_an_op_without_a_kernel_is_named():
    hf, _ = tiny_llama(np.random.default_rng(0))
    config = MODEL.config(hf)
    kernels = [k for k in ReferenceBackend(DEVICE).kernels() if k.op != "rope"]
    kernels.append(Kernel("rope", "odd", print, lambda *_: "heads of 64 only"))
    groups = plan_weights(MODEL.weights(config), tuple(kernels), {})
    tracer = trace(
        MODEL,
        config,
        groups,
        BUCKET,
        LIMITS,
        KernelSelection(tuple(kernels), device_name="npu:0"),
    )
    with pytest.raises(NoKernel, match="rope on npu:0\n  rope/odd: heads of 64 only"):
        ResolvedOps(tracer)
