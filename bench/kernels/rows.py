"""Rows of the table: one call of one kernel, and its equivalent in torch.

A row is a function of its sizes, listed in :data:`ROWS`. ``make`` returns one set of
inputs on the device for all implementations. ``plain`` is plain torch, which is also
compiled; ``library`` is the call of cuBLAS or of torch's flash attention for the main
part of the work only.
"""

# ruff: noqa: ARG001, ARG005 - every way takes all of a row's inputs

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from inl.ops.attention import random_step
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.step import empty_tables
from inl.spec.cache import Cache
from inl.spec.step import NEUTRAL, PARAMS, Step, Tables
from inl.spec.tree import leaves
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.mlp import StackedMlp
from inl_torch.eager.sample import sample as sorted_choice

EPS, BLOCK = 1e-5, 16
Make = Callable[[], tuple[Any, ...]]


@dataclass
class Row:
    """One line of the table."""

    op: str
    shape: str
    make: Make
    ours: Callable[..., Any]
    """Called with the kernel's ``run`` as its first argument."""
    plain: Callable[..., Any]
    library: Callable[..., Any] | None = None
    flops: int = 0
    outputs: int = 0
    """Bytes written; inputs are read once in addition."""
    read: int | None = None
    """Bytes read; by default all inputs."""
    exact: bool = True
    """Whether the results of ``plain`` and the kernel are compared."""

    def nbytes(self, inputs: Any) -> int:
        """Bytes that one call has to move."""
        tensors = (x for x in leaves(inputs) if isinstance(x, torch.Tensor))
        read = sum(x.nbytes for x in tensors) if self.read is None else self.read
        return read + self.outputs


def x(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def weight(n: int, k: int) -> torch.Tensor:
    return x(n, k, scale=k**-0.5)


def norm_of(total: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(total, total.shape[-1:], gain, EPS)


def rms_norm(tokens: int, width: int) -> Row:
    return Row(
        "rms_norm", f"{tokens}x{width}",
        lambda: (x(tokens, width), Norm(x(width))),
        lambda run, a, w: run(a, w, eps=EPS),
        lambda a, w: norm_of(a, w.weight),
        outputs=2 * tokens * width,
    )  # fmt: skip


def reduce_add_norm(tokens: int, width: int) -> Row:
    def plain(a: Any, b: Any, w: Norm) -> Any:
        total = a + b
        return total, norm_of(total, w.weight)

    return Row(
        "reduce_add_norm", f"{tokens}x{width}",
        lambda: (x(tokens, width), x(tokens, width), Norm(x(width))),
        lambda run, a, b, w: run(a, b, w, eps=EPS), plain,
        outputs=4 * tokens * width,
    )  # fmt: skip


def linear(n: int, k: int) -> Row:
    return Row(
        "linear", f"1 row, {n}x{k}",
        lambda: (x(1, k), Linear(weight(n, k))),
        lambda run, a, w: run(a, w),
        lambda a, w: F.linear(a, w.weight),
        lambda a, w: F.linear(a, w.weight),
        flops=2 * n * k, outputs=2 * n,
    )  # fmt: skip


def norm_qkv(tokens: int, hidden: int, keys: int) -> Row:
    n = hidden + 2 * keys

    def plain(a: Any, b: Any, g: Norm, w: StackedQkv) -> Any:
        total = a + b
        y = F.linear(norm_of(total, g.weight), w.weight)
        return total, *y.split_with_sizes((hidden, keys, keys), 1)

    def make() -> tuple[Any, ...]:
        stack = weight(n, hidden)
        # Passed for its number of rows only, so not read.
        w = StackedQkv(stack, stack[hidden : hidden + keys])
        return x(tokens, hidden), x(tokens, hidden), Norm(x(hidden)), w

    return Row(
        "norm_qkv", f"{tokens} rows, {n}x{hidden}", make,
        lambda run, *args: run(*args, eps=EPS), plain,
        lambda a, b, g, w: F.linear(a, w.weight),
        flops=2 * tokens * n * hidden, outputs=2 * tokens * (n + hidden),
        read=2 * (n * hidden + 2 * tokens * hidden + hidden),
    )  # fmt: skip


def norm_mlp(tokens: int, hidden: int, inner: int) -> Row:
    def plain(a: Any, b: Any, g: Norm, w: StackedMlp) -> Any:
        total = a + b
        gate, up = F.linear(norm_of(total, g.weight), w.gate_up).chunk(2, 1)
        return total, F.linear(F.silu(gate) * up, w.down)

    return Row(
        "norm_mlp", f"{tokens} rows, {inner}x{hidden}",
        lambda: (
            x(tokens, hidden), x(tokens, hidden), Norm(x(hidden)),
            StackedMlp(weight(2 * inner, hidden), weight(hidden, inner)),
        ),
        lambda run, *args: run(*args, eps=EPS, activation="silu"), plain,
        lambda a, b, g, w: F.linear(F.linear(a, w.gate_up)[:, :inner], w.down),
        flops=6 * tokens * hidden * inner, outputs=4 * tokens * hidden,
    )  # fmt: skip


def gated_mlp(tokens: int, hidden: int, inner: int) -> Row:
    def plain(a: Any, w: StackedMlp) -> Any:
        gate, up = F.linear(a, w.gate_up).chunk(2, 1)
        return F.linear(F.silu(gate) * up, w.down)

    return Row(
        "gated_mlp", f"{tokens} rows, {inner}x{hidden}",
        lambda: (
            x(tokens, hidden),
            StackedMlp(weight(2 * inner, hidden), weight(hidden, inner)),
        ),
        lambda run, a, w: run(a, w, activation="silu"), plain,
        lambda a, w: F.linear(F.linear(a, w.gate_up)[:, :inner], w.down),
        flops=6 * tokens * hidden * inner, outputs=2 * tokens * hidden,
    )  # fmt: skip


def gated_activation(tokens: int, inner: int) -> Row:
    return Row(
        "gated_activation", f"{tokens}x{inner}",
        lambda: (x(tokens, inner), x(tokens, inner)),
        lambda run, a, b: run(a, b, activation="silu"),
        lambda a, b: F.silu(a) * b,
        outputs=2 * tokens * inner,
    )  # fmt: skip


def norm_logits(tokens: int, hidden: int, vocab: int) -> Row:
    def plain(a: Any, b: Any, at: Any, g: Norm, w: Linear) -> Any:
        return F.linear(norm_of(a[at] + b[at], g.weight), w.weight)

    return Row(
        "norm_logits", f"{tokens} rows, {vocab}x{hidden}",
        lambda: (
            x(tokens, hidden), x(tokens, hidden),
            torch.arange(tokens, dtype=torch.int32, device="cuda"),
            Norm(x(hidden)), Linear(weight(vocab, hidden)),
        ),
        lambda run, *args: run(*args, eps=EPS), plain,
        lambda a, b, at, g, w: F.linear(a, w.weight),
        flops=2 * tokens * vocab * hidden, outputs=2 * tokens * vocab,
    )  # fmt: skip


def device_step(cached: list[int], counts: list[int]) -> tuple[Step, int]:
    step, blocks = random_step(
        np.random.default_rng(), cached, counts, block_size=BLOCK
    )
    return Step(*(torch.from_numpy(np.asarray(a)).cuda() for a in step[:-1])), blocks


def turned(a: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, d] in float32, as every kernel does."""
    one, two = a.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((one * c - two * s, two * c + one * s), -1).to(a.dtype)


def attend_project(rows: int, length: int, heads: int, keys: int, dim: int) -> Row:
    hidden = heads * dim

    def make() -> tuple[Any, ...]:
        step, blocks = device_step([length] * rows, [1] * rows)
        cache = Cache(x(blocks, BLOCK, keys, dim), x(blocks, BLOCK, keys, dim))
        angle = torch.rand(rows, dim // 2, device="cuda")
        return (
            x(rows, heads, dim), x(rows, keys, dim), x(rows, keys, dim), angle.cos(),
            angle.sin(), cache, step, Linear(weight(hidden, hidden)),
        )  # fmt: skip

    def plain(q: Any, k: Any, v: Any, c: Any, s: Any, cache: Any, step: Any, w: Any):
        q, k = turned(q, c, s), turned(k, c, s)
        writes = step.writes[0].long()
        cache.k.view(-1, keys, dim)[writes] = k
        cache.v.view(-1, keys, dim)[writes] = v
        table = step.blocks[0].long()
        k, v = (part[table].flatten(1, 2).transpose(1, 2) for part in cache[:2])
        seen = torch.arange(k.shape[2], device="cuda") < step.lengths[:, None]
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2), k, v, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return F.linear(out.reshape(rows, hidden), w.weight)

    def library(q: Any, k: Any, v: Any, c: Any, s: Any, cache: Any, step: Any, w: Any):
        most = length // BLOCK * BLOCK * rows
        k, v = (
            part.view(-1, keys, dim)[:most].view(rows, -1, keys, dim).transpose(1, 2)
            for part in cache[:2]
        )
        out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)
        return F.linear(out.reshape(rows, hidden), w.weight)

    cells = rows * (length + 1) * keys * dim
    return Row(
        "attend_project", f"{rows} rows, {length} cached, {heads}/{keys}x{dim}", make,
        lambda run, *args: run(*args, scale=dim**-0.5)[0], plain, library,
        flops=4 * rows * length * hidden + 2 * rows * hidden * hidden,
        outputs=2 * rows * (hidden + 2 * keys * dim),
        read=2 * (2 * cells + hidden * hidden + rows * (hidden + 2 * keys * dim)),
    )  # fmt: skip


def attention(tokens: int, heads: int, keys: int, dim: int) -> Row:
    """A prompt of ``tokens`` whose keys are cached."""

    def make() -> tuple[Any, ...]:
        step, blocks = device_step([0], [tokens])
        cache = Cache(x(blocks, BLOCK, keys, dim), x(blocks, BLOCK, keys, dim))
        return x(tokens, heads, dim), cache, step

    def plain(q: Any, cache: Any, step: Any) -> Any:
        table = step.blocks[0, 0].long()
        k, v = (
            part[table].flatten(0, 1)[:tokens].transpose(0, 1)[None]
            for part in cache[:2]
        )
        return library(q, Cache(k, v), step)

    def library(q: Any, cache: Any, step: Any) -> Any:
        k, v = cache[:2]
        if k.shape[0] != 1:
            k, v = (
                part.view(-1, keys, dim)[:tokens].transpose(0, 1)[None]
                for part in cache[:2]
            )
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    attrs = {"scale": dim**-0.5, "window": None, "cap": None, "group": 0}
    return Row(
        "attention", f"prompt of {tokens}, {heads}/{keys}x{dim}", make,
        lambda run, q, cache, step: run(q, cache, step, **attrs), plain, library,
        flops=2 * tokens * tokens * heads * dim, outputs=2 * tokens * heads * dim,
    )  # fmt: skip


def rope(tokens: int, heads: int, keys: int, dim: int) -> Row:
    def make() -> tuple[Any, ...]:
        angle = torch.rand(tokens, dim // 2, device="cuda")
        return x(tokens, heads, dim), x(tokens, keys, dim), angle.cos(), angle.sin()

    return Row(
        "rope", f"{tokens} tokens, {heads}/{keys}x{dim}", make,
        lambda run, *args: run(*args),
        lambda q, k, c, s: (turned(q, c, s), turned(k, c, s)),
        outputs=2 * tokens * (heads + keys) * dim,
    )  # fmt: skip


def write_kv(tokens: int, keys: int, dim: int) -> Row:
    def make() -> tuple[Any, ...]:
        step, blocks = device_step([0], [tokens])
        cache = Cache(x(blocks, BLOCK, keys, dim), x(blocks, BLOCK, keys, dim))
        return x(tokens, keys, dim), x(tokens, keys, dim), cache, step.writes[0]

    def plain(k: Any, v: Any, cache: Any, writes: Any) -> Any:
        cache.k.view(-1, keys, dim)[writes.long()] = k
        cache.v.view(-1, keys, dim)[writes.long()] = v
        return cache.k, cache.v

    return Row(
        "write_kv", f"{tokens} tokens, {keys}x{dim}", make,
        lambda run, *args: run(*args), plain,
        read=4 * tokens * keys * dim, outputs=4 * tokens * keys * dim,
    )  # fmt: skip


def choose(rows: int, vocab: int, sampler: str) -> Row:
    def make() -> tuple[Any, ...]:
        step, _ = device_step([5] * rows, [1] * rows)
        found = empty_tables(groups=1, slots=rows + 1, max_blocks_per_seq=4)
        tables = Tables(*(torch.from_numpy(np.asarray(a)).cuda() for a in found))
        tables.params[:, 0] = 0.0 if sampler == "greedy" else 0.8
        return x(rows, vocab), step, tables

    def plain(logits: Any, step: Any, tables: Any) -> Any:
        if sampler == "greedy":
            return logits.argmax(-1)
        upto = torch.softmax(logits.float() / 0.8, -1).cumsum(-1)
        goal = step.uniforms.view(torch.float32)[:, None]
        return torch.searchsorted(upto, goal, right=True)

    return Row(
        "sample", f"{rows} rows of {vocab}, {sampler}", make,
        lambda run, *args: run(*args, sampler=sampler)[0], plain,
        read=2 * rows * vocab, outputs=4 * rows, exact=sampler == "greedy",
    )  # fmt: skip


def choose_full(rows: int, vocab: int) -> Row:
    """Sampling with a penalty and top-p; torch sorts."""

    def make() -> tuple[Any, ...]:
        step, _ = device_step([5] * rows, [1] * rows)
        found = empty_tables(
            groups=1, slots=rows + 1, max_blocks_per_seq=4, vocab=vocab
        )
        tables = Tables(*(torch.from_numpy(np.asarray(a)).cuda() for a in found))
        settings = dict(zip(PARAMS, NEUTRAL, strict=True))
        settings |= {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
        tables.params[:] = torch.tensor([*settings.values()])
        return x(rows, vocab, scale=3.0), step, tables

    return Row(
        "sample", f"{rows} rows of {vocab}, full", make,
        lambda run, *args: run(*args, sampler="sample_filtered")[0],
        lambda *args: sorted_choice(*args, sampler="sample_filtered")[0],
        read=10 * rows * vocab, outputs=4 * rows, exact=False,
    )  # fmt: skip


def embedding(tokens: int, vocab: int, hidden: int) -> Row:
    return Row(
        "embedding", f"{tokens} of {vocab}x{hidden}",
        lambda: (
            torch.randint(vocab, (tokens,), dtype=torch.int32, device="cuda"),
            Embedding(x(vocab, hidden)),
        ),
        lambda run, *args: run(*args),
        lambda at, w: F.embedding(at, w.weight),
        read=2 * tokens * hidden, outputs=2 * tokens * hidden,
    )  # fmt: skip


SMALL, LARGE = (576, 192), (4096, 1024)
"""SmolLM2-135M's and an 8B model's hidden size and size of all keys."""

ROWS: tuple[Row, ...] = (
    *(norm_qkv(rows, *SMALL) for rows in (1, 8, 32)),
    norm_qkv(1, *LARGE),
    *(norm_mlp(rows, 576, 1536) for rows in (1, 8, 32)),
    norm_mlp(1, 4096, 14336),
    *(attend_project(rows, n, 9, 3, 64) for rows in (1, 8) for n in (512, 4096)),
    attend_project(32, 512, 9, 3, 64), attend_project(512, 576, 9, 3, 64),
    attend_project(512, 576, 32, 8, 128),
    *(attend_project(rows, n, 32, 8, 128) for rows in (1, 8) for n in (512, 4096)),
    *(norm_logits(rows, 576, 49152) for rows in (1, 8)), norm_logits(1, 4096, 128256),
    *(linear(n, 4096) for n in (4096, 6144, 28672)), linear(4096, 14336),
    linear(960, 576), gated_mlp(1, 4096, 14336), gated_mlp(2048, 4096, 14336),
    *(gated_activation(tokens, 14336) for tokens in (8, 2048)),
    *(rms_norm(tokens, 4096) for tokens in (1, 2048)),
    *(reduce_add_norm(tokens, 4096) for tokens in (8, 2048)),
    *(attention(tokens, 32, 8, 128) for tokens in (512, 2048, 8192)),
    attention(8192, 9, 3, 64), *(rope(tokens, 32, 8, 128) for tokens in (8, 2048)),
    *(write_kv(tokens, 8, 128) for tokens in (8, 2048)),
    *(choose_full(rows, 128256) for rows in (1, 64)), choose_full(512, 49152),
    *(choose(rows, 128256, kind) for rows in (1, 64) for kind in ("greedy", "sample")),
    embedding(1, 128256, 4096), embedding(2048, 128256, 4096),
)  # fmt: skip
"""Shapes of decoding at 1 and 8 rows, and of prompts."""
