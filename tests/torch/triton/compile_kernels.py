"""Compile all Triton kernels for a chip without having one; report their resources.

    python tests/torch/triton/compile_kernels.py cuda:90 [--table]

The kernels are called as in a step, on small CPU tensors, with launches replaced by
compilations, so that the signatures are those of real launches. Prints
one JSON list of rows; with ``--table`` a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from inl.ops.attention import random_step
from inl.ops.embedding import Embedding
from inl.ops.full_attention import DistanceBias
from inl.ops.group_route import ExpertBias
from inl.ops.inl import InlBlock
from inl.ops.linear import Linear
from inl.ops.lora import GatedLora, Lora, QkvLora
from inl.ops.moe import ExpertLinear, Experts
from inl.ops.norm import Norm
from inl.ops.recurrent import Decay, Taps
from inl.ops.rope import RopeScaling
from inl.ops.ssm import Ssm
from inl.ops.step import empty_tables
from inl.spec.block_structure import structure_of
from inl.spec.cache import Cache
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket, Step, Tables
from inl_rocm.chips import CHIPS
from inl_rocm.tuning import chip_tuning
from inl_torch import triton as ours
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.attention import prompt as attention_prompt
from inl_torch.triton.dynamics import training as dynamics_training
from inl_torch.triton.float8.products import Products as Float8Products
from inl_torch.triton.float8.weights import Float8
from inl_torch.triton.int4.products import Products as Int4Products
from inl_torch.triton.int4.products import decoded, rounded
from inl_torch.triton.int4.weights import Int4
from inl_torch.triton.matmul.invariant import product as fixed_product
from inl_torch.triton.matmul.products import MIXED, library_is_faster
from inl_torch.triton.matmul.streamed import stream_product
from inl_torch.triton.moe import experts as moe
from inl_torch.triton.moe.packed import ExpertStack
from inl_torch.triton.quantized import products as packed_products
from inl_torch.triton.quantized.packed import FLOAT8, PackedLinear, PackedMlp, packed
from inl_torch.triton.sparse import products as sparse_products
from inl_torch.triton.tuning import Tuning

SHARED = {
    "cuda:80": 166912,
    "cuda:90": 232448,
    "cuda:100": 232448,
    "cuda:120": 101376,
} | {f"hip:{name}": chip.shared_bytes for name, chip in CHIPS.items()}
"""Most shared memory of a program in bytes, by chip."""

MATRIX = re.compile(r"\b(v_s?mfma|v_s?wmma)")
"""Matrix instructions of AMD's chips."""

ATOMIC = re.compile(r"\b(global|buffer|flat)_atomic_add")
STORE = re.compile(r"\b(global|buffer|flat)_store")
COMPLETE = re.compile(
    r"s_waitcnt vmcnt\(0\)|s_waitcnt_vscnt null, 0x0|s_wait_storecnt 0x0"
)
"""Instructions that wait for all stores: of gfx9, of gfx10 and 11, of gfx12."""

HEADS, KV_HEADS, HIDDEN, INNER = 9, 3, 576, 256
"""Sizes of the default model where they affect the code, with its group of 3 heads."""


class Stub:
    """A driver that only returns its target."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def target_of(name):
    kind, arch = name.split(":")
    if kind == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, CHIPS[arch].lanes)


def tuning_for(name):
    """The launch parameters that the chip's backend uses."""
    kind, arch = name.split(":")
    if kind == "hip":
        return chip_tuning(CHIPS[arch], processors=132)
    pdl = int(arch) >= 90
    return Tuning(pdl=pdl, max_rows=32, shared_bytes=SHARED[name], filters=True)


def processor_seconds():
    times = os.times()
    return sum(times[:4])


def recording(found):
    """Compile instead of launching; append (compiled kernel, seconds) to ``found``.

    Seconds of processors, the assembler's included: others may wait for them.
    """
    plain = JITFunction.run

    def run(self, *args, grid, warmup, **options):
        start = processor_seconds()
        compiled = plain(self, *args, grid=(1,), warmup=True, **options)
        spent = processor_seconds() - start
        if all(compiled is not known for known, _ in found):
            found.append((compiled, spent))

    JITFunction.run = functools.wraps(plain)(run)


FEW = (([40], [1]), ([40, 3], [1, 1]), ([40, 3], [1, 20]))
"""Cached and new tokens of one row, of a few, and with prompts."""

MEDIUM = ([40, 3], [1, 300])
"""A prompt whose tiles have another size where their keys are split."""

MANY = (40, 350)
"""Rows of large decoding steps."""


def torch_steps(sizes):
    """(step, blocks) of rows with these cached and new tokens."""
    for cached, new in sizes:
        host, blocks = random_step(np.random.default_rng(0), cached, new, block_size=16)
        yield Step(*(torch.from_numpy(np.asarray(a)) for a in host[:-1])), blocks


def rope_attend(kernels, q, *rest, **attrs):
    """Attention of a decoding step, or of another."""
    step = rest[-1]
    decodes = q.shape[0] == step.lengths.shape[0]
    label = "rope_attend" if decodes else ("rope_attend", "triton_mixed")
    kernels[label](q, *rest, **attrs)


def attention(kernels, *args, **attrs):
    """Attention of a step; with prompts also with the keys of tiles split."""
    kernels["attention"](*args, **attrs)
    q, _, step = args
    if q.shape[0] != step.lengths.shape[0]:
        kernels["attention", "triton_split"](*args, **attrs)


def call_attention(kernels, dtype, dim):
    """Attention of one row, of a few, with prompts, and of many."""
    many = [([40] * rows, [1] * rows) for rows in MANY]
    for step, blocks in torch_steps((*FEW, MEDIUM, *many)):
        tokens = step.tokens.shape[0]
        q, k = (torch.ones(tokens, n, dim, dtype=dtype) for n in (HEADS, KV_HEADS))
        cache = Cache(
            *(torch.ones(blocks, 16, KV_HEADS, dim, dtype=dtype) for _ in range(2))
        )
        turn = torch.ones(tokens, dim // 2)
        for window, cap in ((None, None), (7, 3.0)):
            attrs = {"scale": 0.1, "window": window, "cap": cap, "group": 0}
            attention(kernels, q, cache, step, **attrs)
            rope_attend(kernels, q, k, k, turn, turn, cache, step, **attrs)


def call_float8(kernels, dtype, dim):
    """A cache in float8: writes, and attention of one row, of a few, with prompts."""
    attrs = {"scale": 0.1, "window": None, "cap": None, "group": 0}
    for step, blocks in torch_steps(FEW):
        tokens = step.tokens.shape[0]
        q, k = (torch.ones(tokens, n, dim, dtype=dtype) for n in (HEADS, KV_HEADS))
        shape = blocks, 16, KV_HEADS, dim
        numbers = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2))
        cache, turn = Cache(*numbers, torch.ones(2)), torch.ones(tokens, dim // 2)
        kernels["write_kv"](k, k, cache, step.writes[0])
        attention(kernels, q, cache, step, **attrs)
        rope_attend(kernels, q, k, k, turn, turn, cache, step, **attrs)


def call_long_rows(dtype, dim, tuning):
    """Attention of a long row beside another, with each kind of cache."""
    kernels = named(dataclasses.replace(tuning, long_row_tokens=16))
    ((step, blocks),) = torch_steps(FEW[-1:])
    q = torch.ones(step.tokens.shape[0], HEADS, dim, dtype=dtype)
    shape = blocks, 16, KV_HEADS, dim
    for kind, scales in ((dtype, None), (torch.float8_e4m3fn, torch.ones(2))):
        cache = Cache(*(torch.zeros(shape, dtype=kind) for _ in range(2)), scales)
        attrs = {"scale": 0.1, "window": None, "cap": None, "group": 0}
        kernels["attention", "triton_gathered"](q, cache, step, **attrs)


def call_many(kernels, dtype, dim):
    """Sampling filters of many rows."""
    tables = Tables(
        *(
            torch.from_numpy(a)
            for a in empty_tables(groups=1, slots=4, max_blocks_per_seq=5)
        )
    )
    for step, _ in torch_steps(([40] * rows, [1] * rows) for rows in MANY):
        logits = torch.empty(step.tokens.shape[0], 49152, dtype=dtype)
        kernels["sample"](logits, step, tables, sampler="sample_filtered")


def call_verification(kernels):
    """A step that verifies drafts, without token counts and with them."""
    bucket = Bucket(6, 2, 4)
    row = Row(1, [-1, -2, -2], [0.5] * 7, [3] * 6)
    frame = step_frame(bucket, [row], step=0, groups=1, block_size=16, decode_rows=1)
    for vocab in (0, 97):
        empty = empty_tables(groups=1, slots=4, max_blocks_per_seq=5, vocab=vocab)
        tables = Tables(*map(torch.from_numpy, empty))
        step, tables = kernels["make_step"](
            torch.from_numpy(frame), tables, bucket=bucket, block_size=16
        )
        if not vocab:
            kernels["expand_rows"](step, tables)
        kernels["verify"](torch.ones(6).int(), step, tables, width=4)


def call_invariant(kernels, dtype, dim):
    """Products and attention of the invariant mode, which are the same in any step."""
    x = torch.ones(3, HIDDEN, dtype=dtype)
    fixed_product(x, torch.ones(INNER, HIDDEN, dtype=dtype), x[0, :INNER])
    ((step, blocks),) = torch_steps(FEW[:1])
    q = torch.ones(1, HEADS, dim, dtype=dtype)
    cache = Cache(
        *(torch.ones(blocks, 16, KV_HEADS, dim, dtype=dtype) for _ in range(2))
    )
    attrs = {"scale": 0.1, "window": None, "cap": None, "group": 0}
    kernels["attention", "triton_rows"](q, cache, step, **attrs)


def call_dynamics(kernels, dtype):
    """INL dynamics: forward, a model's layer, and backward."""
    x, controller = torch.ones(3, 700, dtype=dtype), torch.ones(3, 2100, dtype=dtype)
    clamps = {"dt": 0.1, "most_beta": 2.0, "limit": 10.0}
    kernels["inl_dynamics"](x, x, x[0], x, x, x, dt=0.1)
    kernels["inl_dynamics_step"](x, x, x[0], controller, **clamps)
    inner, wide = torch.ones(64, 1400, dtype=dtype), torch.ones(2100, 64, dtype=dtype)
    w = InlBlock(x[0], inner, inner[:, 0], wide, wide[:, 0], x[:1].expand(700, 700))
    kernels["inl_block", MIXED](x, x, w, dt=0.1)
    operands = (x, x[0], *controller.chunk(3, -1))
    options = dynamics_training.Options(3, True, 2.0, 10.0)
    dynamics_training.gradients(x, x, x, operands, 0.1, options, (True,) * 6 + (False,))


def call_experts(kernels, dtype):
    """Experts with few slots, and with many, which are sorted."""
    for tokens, count in ((1, 8), (100, 8), (1000, 4)):
        x, ids = torch.ones(tokens, HIDDEN, dtype=dtype), torch.zeros(tokens, 2).int()
        wide, narrow = (count, INNER, HIDDEN), (count, HIDDEN, INNER)
        w = Experts(*(torch.ones(s, dtype=dtype) for s in (wide, wide, narrow)))
        weights = torch.ones(tokens, 2)
        kernels["experts"](x, ids, weights, w, activation="silu")
        kernels["expert_linear"](x[:, None], ids, ExpertLinear(w.gate))
        parts = {kernel.op: kernel.run_part for kernel in moe.KERNELS}
        if dtype == torch.bfloat16 and tokens < 1000:  # one rank of several
            parts["experts"](x, ids, weights, w, activation="silu")


def call_routing(kernels, dtype):
    """Routing with and without groups, and gates of shared experts."""
    logits = torch.ones(3, 128, dtype=dtype)
    for kind in ("softmax_topk", "topk_softmax", "sigmoid"):
        kernels["route"](logits, k=8, kind=kind, renormalize=True)
    sizes = {"k": 8, "groups": 8, "chosen": 4, "best_of": 2, "renormalize": True}
    for kind in ("sigmoid", "softmax"):
        bias = ExpertBias(torch.ones(128))
        kernels["group_route"](logits, bias, kind=kind, **sizes)
    kernels["sigmoid_gate"](logits, logits[:, :1])


def as_installed():
    """Patch the version of torch to one for the GPU that is compiled for."""
    backend = triton.runtime.driver.active.get_current_target().backend
    return mock.patch.object(torch.version, "hip", "6.4" if backend == "hip" else None)


def call_recurrent(kernels, dtype, dim):
    """Short convolutions, the delta rule and the scan of Mamba-2."""
    for step, _ in torch_steps((*FEW, MEDIUM)):
        tokens = step.tokens.shape[0]
        x, table = torch.ones(tokens, HIDDEN, dtype=dtype), torch.ones(9, 3, HIDDEN)
        taps = Taps(torch.ones(HIDDEN, 1, 4, dtype=dtype))
        kernels["causal_conv"](x, table.to(dtype), step, taps)
        q, v = (torch.ones(tokens, n, dim, dtype=dtype) for n in (2, 4))
        a, decay = torch.ones(tokens, 4, dtype=dtype), Decay(*torch.ones(2, 4))
        table = torch.ones(9, 4, dim, dim)
        kernels["delta_rule"](q, q, v, a, a, table, step, decay, tiled=False)
        ssm = Ssm(*torch.ones(2, 4), *torch.ones(2, 4, dtype=dtype))
        with as_installed():
            kernels["ssm_scan"](v, q, q, a, table, step, ssm)


def call_indexed(kernels, dtype):
    """Sparse attention of the sizes of DeepSeek-V3.2, for few tokens and for many."""
    for step, blocks in torch_steps((*FEW, MEDIUM)):
        tokens = step.tokens.shape[0]

        def x(*shape, tokens=tokens):
            return torch.ones(tokens, *shape, dtype=dtype)

        cells = torch.ones(blocks, 16, 1, 576, dtype=dtype)
        cache, sizes = Cache(cells, cells), {"group": 0}
        choose = kernels["index_topk", "triton+eager"]
        choose(x(64, 128), x(64), cache, step, k=64, **sizes)
        ids = torch.zeros(tokens, 2048, dtype=torch.int32)
        with as_installed():
            if torch.version.hip is not None and dtype == torch.float32:
                continue  # refused
            kernels["sparse_attention"](
                x(128, 576), ids, cache, step, scale=0.1, **sizes
            )


def call_block_sparse(dtype):
    """Block-sparse products by small tiles and by large ones, and their gradients."""
    for count, size in ((2, 32), (16, 128)):
        places = [[i, j] for i in range(count) for j in range(count)]
        x, values = (
            torch.ones(16 * size, count * size, dtype=dtype),
            torch.ones(len(places), size, size, dtype=dtype),
        )
        matrix = structure_of(places, tuple(values.shape), count * size, count * size)
        with as_installed():
            sparse_products.multiply(x, values, matrix, transposed=False)
            sparse_products.multiply(x, values, matrix, transposed=True)
            sparse_products.sample(x, x, matrix)


def call_adapters(kernels, dtype):
    """Adapters of a tile of tokens and of more, with few columns and with many."""
    sizes = ((32, 128), (40, 160)) if dtype == torch.bfloat16 else ((40, 160),)
    for tokens, columns in sizes:
        x, y = (torch.ones(tokens, n, dtype=dtype) for n in (4096, HIDDEN))
        a, b = torch.ones(columns, 4096), torch.ones(HIDDEN, columns)
        pair, chosen = (a.to(dtype), b.to(dtype)), torch.ones(tokens, columns).to(dtype)
        gated = GatedLora(*2 * pair)
        kernels["gated_lora"](y, y, x, gated, chosen, rank=16, activation="silu")
        if dtype == torch.bfloat16:
            kernels["lora"](y, x, Lora(*pair), chosen, rank=16)
            kernels["qkv_lora"](y, y, y, x, QkvLora(*3 * pair), chosen, rank=16)
            if has_copy_engine():
                for rows in (8, 32):
                    call_adapted(kernels, x[:rows], pair, chosen[:rows])


def call_adapted(kernels, x, pair, chosen):
    """Streamed products with adapters."""
    base = torch.ones(HIDDEN, x.shape[1], dtype=x.dtype)
    kernels["adapted_linear"](x, Linear(base), Lora(*pair), chosen, rank=16)
    stacked = StackedQkv(base.repeat(3, 1), base)
    loras, gated = QkvLora(*3 * pair), GatedLora(*2 * pair)
    kernels["adapted_qkv_linear"](x, stacked, loras, chosen, rank=16)
    kernels["adapted_gate_up"](
        x, Linear(base), Linear(base), gated, chosen, rank=16, activation="silu"
    )


def packed_weights():
    """A matrix and a feed-forward layer of each kind."""
    for kind, group, has_offsets in (
        (torch.uint8, 32, True), (torch.uint8, 32, False), (torch.int8, 32, False),
        (FLOAT8, HIDDEN, False),
    ):  # fmt: skip

        def matrix(rows, columns, kind=kind, group=group, has_offsets=has_offsets):
            scales = torch.ones(rows, max(columns // group, 1)).half()
            codes = torch.ones(rows, columns).to(kind)
            return packed(codes, scales, scales if has_offsets else None)

        mlp = PackedMlp(matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER))
        yield PackedLinear(matrix(HIDDEN, HIDDEN)), mlp


def call_streamed(dtype, tuning):
    """Products with matrices of 8 and 4 bits, of all tiles."""
    for width in (32, 128, 0):
        products = (Int4Products if width else Float8Products)(tuning)
        for tokens in (1, 10, 30, 40, 128):

            def matrix(n, k, width=width):
                if not width:
                    return Float8(torch.ones(n, k).to(FLOAT8), torch.ones(n))
                heads = torch.ones(n, k // width).half()
                codes = torch.ones(n, k // 2, dtype=torch.uint8)
                return Int4(codes, heads, heads)

            x = torch.ones(tokens, 512, dtype=dtype)
            few, many = matrix(64, 512), matrix(64 * 132, 512)
            mlp = StackedMlp(matrix(1024, 512), matrix(512, 512))
            products.norm_product(x, x, Norm(x[0]), 1e-5, few, None)
            products.product(x, many, x.repeat(1, 17)[0, : 64 * 132])
            products.mlp(x, mlp, "silu")
        if width:
            decoded(few, dtype)
            rounded(few)


def packed_stack(kind, *shape):
    """Packed matrices of experts, of a dtype of files."""
    *lead, columns = shape
    codes = torch.ones(*lead, columns // (2 if "4" in kind else 1))
    codes = codes.to({"q8_0": torch.int8, "mxfp8": FLOAT8}.get(kind, torch.uint8))
    scales = torch.ones(*lead, columns // 32)
    scales = scales.to({"mxfp8": torch.bfloat16, "mxfp4": torch.uint8}.get(
        kind, torch.float16
    ))  # fmt: skip
    return ExpertStack(codes, scales, scales if kind == "q4_1" else None)


def call_packed_experts(dtype):
    """Packed experts with few slots and with many, in tiles of two sizes."""
    kernels = {kernel.op: kernel.run for kernel in moe.PACKED_KERNELS}
    kinds = ("q4_1", "q8_0", "mxfp8", "mxfp4")
    for kind in kinds if dtype == torch.bfloat16 else kinds[::2]:
        for tokens, count in ((1, 8), (100, 8), (1000, 4)):
            x, ids = torch.ones(tokens, HIDDEN, dtype=dtype), torch.zeros(tokens, 2)
            wide = packed_stack(kind, count, INNER, HIDDEN)
            narrow = packed_stack(kind, count, HIDDEN, INNER)
            w, shares = Experts(wide, wide, narrow), torch.ones(tokens, 2)
            kernels["experts"](x, ids.int(), shares, w, activation="silu")
            if kind == "mxfp4" and tokens == 1:
                parts = {kernel.op: kernel.run_part for kernel in moe.PACKED_KERNELS}
                parts["experts"](x, ids.int(), shares, w, activation="silu")


def named(tuning):
    """Kernels by op; those with other names than "triton" by op and name."""
    found = {}
    for kernel in ours.kernels(tuning):
        fast = kernel.name == "triton"
        found[kernel.op if fast else (kernel.op, kernel.name)] = kernel.run
    return found


def call_all(dtype, dim, tuning, *, packed=True):
    """Call every kernel once for each launch configuration."""
    kernels = named(tuning)
    call_invariant(kernels, dtype, dim)
    call_attention(kernels, dtype, dim)
    call_sequences(kernels, dtype, dim)
    if dtype == torch.bfloat16:
        call_float8(kernels, dtype, dim)
        if has_copy_engine():
            call_long_rows(dtype, dim, tuning)
    if dtype != torch.float32 and dim == 64 and has_copy_engine():
        call_streamed(dtype, tuning)
    more = {kernel.op: kernel.run for kernel in packed_products.kernels(tuning)}

    def x(*shape):
        return torch.ones(shape, dtype=dtype)

    width = HEADS * dim
    packings = list(packed_weights()) if packed else []
    if packed:
        call_packed_experts(dtype)
    call_adapters(kernels, dtype)
    call_verification(kernels)
    call_dynamics(kernels, dtype)
    call_experts(kernels, dtype)
    call_routing(kernels, dtype)
    call_block_sparse(dtype)
    call_recurrent(kernels, dtype, dim)
    if dim == 64:
        call_indexed(kernels, dtype)
        call_wide_heads(kernels, dtype)
    call_many(kernels, dtype, dim)
    norm = Norm(x(HIDDEN))
    qkv = StackedQkv(x(width + 2 * KV_HEADS * dim, HIDDEN), x(KV_HEADS * dim, HIDDEN))
    mlp = StackedMlp(x(2 * INNER, HIDDEN), x(HIDDEN, INNER))
    sums = {"eps": 1e-5}
    for step, blocks in torch_steps(FEW):
        tokens, rows = step.tokens.shape[0], step.lengths.shape[0]
        q, k = x(tokens, HEADS, dim), x(tokens, KV_HEADS, dim)
        cache = Cache(*(x(blocks, 16, KV_HEADS, dim) for _ in range(2)))
        cos, sin = kernels["rope_table"](
            step.positions, dim=dim, theta=1e4, scaling=RopeScaling()
        )
        kernels["rope"](q, k, cos, sin)
        kernels["write_kv"](k, k, cache, step.writes[0])
        y = kernels["embedding"](step.tokens, Embedding(x(97, HIDDEN)))
        own = not library_is_faster(tokens, dtype, mlp.gate_up.shape, tuning)
        for activation in ("silu", "gelu_tanh"):
            if own:
                kernels["norm_mlp", MIXED](
                    y, y, norm, mlp, activation=activation, **sums
                )
            kernels["gated_mlp", MIXED](y, mlp, activation=activation)
            kernels["gated_activation"](y, y, activation=activation)
        kernels["reduce_add_norm"](y, y, norm, **sums)
        if own:
            kernels["norm_qkv"](y, y, norm, qkv, **sums)
        kernels["rms_norm"](y, norm, **sums)
        if own:
            kernels["linear"](y, Linear(x(HIDDEN, HIDDEN)))
        for linear, feed_forward in packings:
            more["linear"](y, linear)
            more["gated_mlp"](y, feed_forward, activation="silu")
            if tokens == 1:
                more["norm_mlp"](y, y, norm, feed_forward, activation="silu", **sums)
                more["norm_logits"](y, y, step.samples, norm, linear, **sums)
            packed_products.dequantized(linear.weight, dtype)
        head = Linear(x(HIDDEN, HIDDEN), x(HIDDEN))
        logits = kernels["norm_logits", MIXED](y, y, step.samples, norm, head, **sums)
        bucket = Bucket(tokens, rows)
        frame = step_frame(
            bucket, [Row(1, [-1])], step=0, groups=1, block_size=16, decode_rows=1
        )
        tables = Tables(
            *(
                torch.from_numpy(a)
                for a in empty_tables(groups=1, slots=4, max_blocks_per_seq=5)
            )
        )
        kernels["make_step"](
            torch.from_numpy(frame), tables, bucket=bucket, block_size=16
        )
        kernels["prune_last_layer"](step)
        kernels["admit"](
            torch.from_numpy(
                admit_frame(1, [[1]], groups=1, max_blocks_per_seq=5, length=0, last=0)[
                    None
                ]
            ),
            tables,
        )
        for sampler in ("greedy", "sample", "sample_filtered"):
            kernels["sample"](logits, step, tables, sampler=sampler)
        kernels["score"](logits, step.tokens[: logits.shape[0]])
        if dtype == torch.bfloat16 and 1 < tokens <= 32 and has_copy_engine():
            for width in (512, HIDDEN):
                few, wide = x(tokens, width), x(1024, width)
                stream_product(few, wide, None, tuning, gated="silu")
                stream_product(few, wide, None, tuning)
        if dtype == torch.bfloat16 and dim == 128 and has_copy_engine():
            attention_prompt.attend_prompt(q, k, k, cache, step, scale=0.1, group=0)


def has_copy_engine():
    """Whether long prompts use one on the target: large chips from Hopper on."""
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and 90 <= target.arch < 120


def call_sequences(kernels, dtype, dim):
    """Attention within sequences; of vision encoders with heads of 72 elements."""
    starts = torch.tensor([0, 90, 190], dtype=torch.int32)
    for size in (dim, 72) if dim == 64 else (dim,):
        q = torch.ones(200, HEADS, size, dtype=dtype)
        for window in (None, 7):
            kernels["full_attention"](q, q, q, starts, scale=0.1, window=window)
        bias = DistanceBias(torch.ones(9, HEADS, dtype=dtype))
        kernels["biased_attention"](q, q, q, starts, bias, scale=0.1)


def call_wide_heads(kernels, dtype):
    """Attention of latents of DeepSeek-V3: of one token, of a prompt, of few heads."""
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip" and (dtype == torch.float32 or target.warp_size == 32):
        return  # refused
    for heads, size in ((128, FEW[0]), (16, FEW[0]), (128, MEDIUM)):
        ((step, blocks),) = torch_steps([size])
        tokens = step.tokens.shape[0]
        q = torch.ones(tokens, heads, 576, dtype=dtype)
        cache = Cache(*(torch.ones(blocks, 16, 1, 576, dtype=dtype) for _ in range(2)))
        kernels["attention", "triton_wide"](q, cache, step, scale=0.1, group=0)


def call_attention_only(dtype, dim, tuning):
    """Call the kernels whose code depends on the head size most."""
    kernels = named(tuning)
    call_sequences(kernels, dtype, dim)
    call_attention(kernels, dtype, dim)
    call_float8(kernels, dtype, dim)


def fake_cudnn(q, _k, _v, _scale):
    """Stands in for cuDNN, which is not compiled here."""
    return torch.ones_like(q), torch.ones(q.shape[1], q.shape[0])


def resources(compiled, target):
    """Registers, spilled bytes and shared bytes of one compiled kernel."""
    shared = compiled.metadata.shared
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        numbers = [
            int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))
            for name in ("vgpr_count", "vgpr_spill_count")
        ]
        return (*numbers, shared)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    registers, stack = (
        int(re.search(rf"{name}:(\d+)", told).group(1)) for name in ("REG", "STACK")
    )
    return registers, stack, shared


def publishes_stores(text):
    """Whether all stores are complete at the barrier before a kernel's first atomic.

    A thread's atomic releases the stores of the others only if they are complete.
    """
    lines = text.splitlines()
    atomic = next((at for at, line in enumerate(lines) if ATOMIC.search(line)), None)
    if atomic is None:
        return True
    before = lines[:atomic]
    barriers = [at for at, line in enumerate(before) if "s_barrier" in line]
    # A program of one wavefront has none, and releases its own stores.
    barrier = barriers[-1] if barriers else 0
    for line in reversed(before[:barrier]):
        if COMPLETE.search(line) or STORE.search(line):
            return COMPLETE.search(line) is not None
    return True


def row(compiled, spent, dtype, dim, target):
    registers, spills, shared = resources(compiled, target)
    return {
        "kernel": compiled.metadata.name, "dtype": dtype, "dim": dim,
        "warps": compiled.metadata.num_warps, "registers": registers,
        "spills": spills, "shared": shared, "seconds": round(spent, 2),
        "tf32": "tf32" in compiled.asm.get("ptx", ""),
        "unordered": not publishes_stores(compiled.asm.get("amdgcn", "")),
        "matrix": sorted(set(MATRIX.findall(compiled.asm.get("amdgcn", "")))),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="cuda:90, hip:gfx942 and so on")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--attention", action="store_true", help="attention only")
    parser.add_argument("--skip-packed", action="store_true")
    given = parser.parse_args()
    target = target_of(given.target)
    driver.set_active(Stub(target))
    tuning = tuning_for(given.target)
    rows, found = [], []
    recording(found)
    attention_prompt.attend_self = fake_cudnn
    call = functools.partial(call_all, packed=not given.skip_packed)
    if given.attention:
        call = call_attention_only
    for dtype in given.dtypes:
        for dim in given.dims:
            call(getattr(torch, dtype), dim, tuning)
            rows += [row(kept, spent, dtype, dim, target) for kept, spent in found]
            found.clear()
    if not given.table:
        print(json.dumps(rows))
        return
    for item in rows:
        print("  ".join(f"{value!s:>14}" for value in item.values()))


if __name__ == "__main__":
    sys.exit(main())
