"""Cases with the sizes of published models.

A kernel may be right for the small sizes of ``OpSpec.cases`` and wrong for the heads,
vocabularies, ranks, widths of drafts, windows or block numbers of a real model: a tile
that is not covered, or a type that is too narrow. Only the axis that matters is large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.ops.attention import attention_case
from inl.ops.embedding import Embedding
from inl.ops.fused import attend_case
from inl.ops.mlp import GatedMlp
from inl.ops.rope import RopeScaling
from inl.ops.sample_cases import decided_case
from inl.ops.sink_attention import Sinks
from inl.ops.step import empty_tables
from inl.ops.verify import verify_step
from inl.spec.cache import Cache
from inl.spec.message import (
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    step_frame,
    token_bias_frame,
)
from inl.spec.op import Case, Sizes
from inl.spec.step import Bucket, Step

if TYPE_CHECKING:
    from inl.spec.op import OpSpec

Rng = np.random.Generator
Heads = tuple[int, int, int]

HEADS: Final = (
    (14, 2, 64), (28, 4, 128), (40, 8, 128), (8, 1, 256), (32, 8, 128), (12, 2, 128),
    (32, 32, 96), (16, 1, 80),
)  # fmt: skip
"""(heads, kv_heads, head_dim) of Qwen2.5 0.5B, 7B and 14B, Gemma 2B, Llama 3 8B,
Qwen2.5 1.5B and Phi-3 mini, and 16 heads of 80 lanes on one key head."""
FULL_HEADS: Final = ((71, 1, 64), (64, 8, 128), (16, 8, 80), (96, 8, 192))
"""Heads that only a full check tests: Falcon 7B, Llama 70B, 80 lanes, Nemotron 340B."""

WINDOWS: Final = (
    ("context 4100", 1024), ("context 4100", 4096), ("chunk at 1000", 512),
    ("chunk at 1000", 128),
)  # fmt: skip
"""Shape and window of the cases of attention over more keys than a window."""

VOCAB: Final = 2003
"""More columns than a block of threads has, and no multiple of a tile."""
LARGE_VOCAB: Final = 262_147
"""Above 65,535, the largest number of 16 bits, and the 262,144 tokens of Gemma."""

FAR: Final = 300
"""Number that is added to block ids: above 255, the largest number of 8 bits."""
FURTHER: Final = 33_000
"""Above 32,767; a cache of 64 GB has more blocks."""

WIDTHS: Final = (2, 3, 5, 8, 16, 17)
"""Tokens of a row that verifies 1 to 16 drafts."""

PRODUCTS: Final = (
    (1, 1030, 64), (5, 4099, 48), (3, 72, 4864), (2, 151_939, 8), (2, 24, 28_672),
    (1, 2048, 1024), (6, 1024, 512),
)  # fmt: skip
"""(tokens, outputs, inputs): outputs beyond 1,024, 4,096 and 65,536, and no multiple of
a tile; the inner widths of Qwen2.5 0.5B and Llama 70B; whole tiles only."""
NORM_PRODUCTS: Final = ((1, 1030, 64), (5, 4099, 48), (3, 72, 896))
LORAS: Final = (
    (3, 96, 160, 4, 16), (2, 4099, 64, 3, 64), (5, 48, 96, 2, 256), (3, 48, 40, 33, 12)
)  # fmt: skip
"""(tokens, outputs, inputs, adapters, rank)."""
EXPERTS: Final = (
    (5, 128, 8), (3, 60, 4), (2, 256, 8), (3, 32, 4), (4, 16, 1), (2, 64, 6),
    (2, 512, 10), (300, 8, 2),
)  # fmt: skip
"""(tokens, experts, experts per token) of Qwen3 30B, Qwen1.5 MoE, DeepSeek-V3, GPT-OSS
20B, Llama 4 Scout, DeepSeek-V2 Lite and Qwen3-Next."""

SIZES: Final[Mapping[str, Sizes]] = {
    "linear": PRODUCTS,
    "qkv_linear": ((1, 1030, 64), (3, 72, 896)),
    "gated_mlp": ((2, 64, 1030), (1, 64, 4864)),
    "norm_qkv": ((1, 1030, 64), (3, 72, 896)),
    "norm_mlp": ((1, 1030, 64), (3, 72, 896)),
    "norm_logits": NORM_PRODUCTS,
    "lora": LORAS,
    "qkv_lora": LORAS,
    "gated_lora": LORAS,
    "adapted_linear": LORAS,
    "adapted_qkv_linear": LORAS,
    "adapted_gate_up": LORAS,
    "rope": (
        (3, 28, 4, 128),
        (2, 71, 1, 64),
        (2, 32, 32, 96),
        (2, 8, 1, 256),
        (2, 16, 1, 80),
    ),
    "head_linear": ((2, 16, 128, 512),),
    "rms_norm": ((2, 5120), (1, 8192), (1, 16_384), (3, 896), (2, 2304)),
    "reduce_add_norm": ((2, 5120), (3, 896), (1, 16_384)),
    "add_norm": ((2, 5120), (3, 896), (1, 16_384)),
    "route": EXPERTS,
    "expert_linear": EXPERTS,
    "experts": EXPERTS,
    "group_route": ((5, 8, 8, 6, 3),),
    "delta_rule": ((2, 4, 128, 128),),
    "ssm_scan": ((1, 3, 128, 64),),
}
"""Sizes that the op's own function of cases takes."""


def real_cases(
    op: OpSpec, names: Sequence[str], rng: Rng, *, full: bool
) -> Iterator[Case]:
    """Yield cases of ``op`` with sizes of published models.

    names: those of the op's own cases, which are left out. full: more sizes.
    """
    if op.name in SIZES:
        for case in op.cases(rng, SIZES[op.name]):
            if case.name not in names:
                yield case
    if op.name in ATTENTION:
        yield from _attention_cases(op.name, rng, full=full)
    if op.name in OTHERS:
        yield from OTHERS[op.name](rng)


def _sinks(rng: Rng, name: str, heads: Heads, attrs: dict[str, Any]) -> Case:
    case = attention_case(rng, name, heads, attrs)
    given = {key: value for key, value in case.attrs.items() if key != "cap"}
    sinks = Sinks(2 * rng.standard_normal(heads[0]))
    return Case(case.name, (*case.args, sinks), given)


def _attend(rng: Rng, name: str, heads: Heads, attrs: dict[str, Any]) -> Case:
    case = attend_case(rng, name, heads, attrs)
    q, k, v, _cos, _sin, cache, step, _w = case.args
    return replace(case, args=(q, k, v, cache, step))


def _rope_attend(rng: Rng, name: str, heads: Heads, attrs: dict[str, Any]) -> Case:
    case = attend_case(rng, name, heads, attrs)
    return replace(case, args=case.args[:-1])


ATTENTION: Final[Mapping[str, Callable[[Rng, str, Heads, dict[str, Any]], Case]]] = {
    "attention": attention_case,
    "sink_attention": _sinks,
    "attend": _attend,
    "rope_attend": _rope_attend,
    "attend_project": attend_case,
}


def _attention_cases(name: str, rng: Rng, *, full: bool) -> Iterator[Case]:
    make = ATTENTION[name]
    for heads in (*HEADS, *(FULL_HEADS if full else ())):
        yield make(rng, "mixed", heads, {})
    for shape, window in WINDOWS:
        case = make(rng, shape, (4, 2, 16), {"window": window})
        yield replace(case, name=f"{case.name} {window}")
    yield make(rng, "mixed", (4, 2, 16), {"scale": 0.4})
    case = make(rng, "mixed", (4, 2, 16), {"window": 3, "cap": 5.0})
    yield case if "cap" in case.attrs else replace(case, name=f"{case.name}, no cap")
    yield _second_group(make(rng, "mixed", (4, 2, 16), {"group": 1}))
    for distance in (FAR, FURTHER) if full or name == "attention" else (FAR,):
        yield _moved(make(rng, "mixed", (2, 1, 8), {}), distance)


def _second_group(case: Case) -> Case:
    """Return a case whose blocks are those of the second of two cache groups."""

    def grouped(arg: Any) -> Any:
        if not isinstance(arg, Step):
            return arg
        blocks = np.concatenate([arg.blocks[..., ::-1], arg.blocks])
        return arg._replace(
            blocks=blocks, writes=np.concatenate([arg.writes + 1, arg.writes])
        )

    return replace(case, args=tuple(map(grouped, case.args)))


def _moved(case: Case, distance: int) -> Case:
    """Return a case whose blocks, but for the unused block 0, are ``distance`` on."""

    def moved(arg: Any) -> Any:
        if isinstance(arg, Cache):
            wide = np.zeros((distance, *arg.k.shape[1:]))
            return Cache(*(np.concatenate((x[:1], wide, x[1:])) for x in arg[:2]))
        if isinstance(arg, Step):
            size = 4
            blocks = np.where(arg.blocks > 0, arg.blocks + distance, 0)
            writes = np.where(arg.writes >= size, arg.writes + distance * size, 0)
            return arg._replace(
                blocks=blocks.astype(np.int32), writes=writes.astype(np.int32)
            )
        return arg

    args = tuple(map(moved, case.args))
    return replace(case, name=f"{case.name}/block {distance}", args=args)


def _write_kv(rng: Rng) -> Iterator[Case]:
    for distance in (FAR, FURTHER):
        k, v = rng.standard_normal((2, 5, 1, 8))
        cache = Cache(*np.zeros((2, distance + 8, 4, 1, 8)))
        cells = 4 * distance + rng.permutation(np.arange(4, 32))[:5]
        args = (k, v, cache, cells.astype(np.int32))
        yield Case(f"block {distance}", args)


def _embedding(rng: Rng) -> Iterator[Case]:
    ids = np.array([LARGE_VOCAB - 1, 65_536, 32_768, 300, 0], np.int32)
    weight = rng.standard_normal((LARGE_VOCAB, 8))
    yield Case(f"5x{LARGE_VOCAB}x8", (ids, Embedding(weight)))


def _score(rng: Rng) -> Iterator[Case]:
    for vocab in (VOCAB, LARGE_VOCAB):
        logits = 3 * rng.standard_normal((2, vocab))
        yield Case(f"2x{vocab}", (logits, np.array([vocab - 1, 1025], np.int32)))


def _mask_logits(rng: Rng) -> Iterator[Case]:
    for vocab in (VOCAB, LARGE_VOCAB):
        words = rng.integers(-(2**31), 2**31, (2, -(-vocab // 32))).astype(np.int32)
        yield Case(f"2x{vocab}", (rng.standard_normal((2, vocab)), words))


def _sample(rng: Rng) -> Iterator[Case]:
    for sampler, vocab in (
        ("greedy", LARGE_VOCAB), ("sample", VOCAB), ("sample_filtered", VOCAB),
        ("sample_filtered", 50_257),
    ):  # fmt: skip
        yield decided_case(rng, sampler, vocab)


def _soft_cap(rng: Rng) -> Iterator[Case]:
    for vocab in (VOCAB, LARGE_VOCAB):
        logits = 40 * rng.standard_normal((2, vocab))
        yield Case(f"2x{vocab}", (logits,), {"cap": 30.0})


def _rope_table(_rng: Rng) -> Iterator[Case]:
    """Yield other bases than 10,000 and long contexts, as of Qwen2.5 and Llama 3."""
    positions = np.array([0, 3, 4097, 40_961], np.int32)
    for dim, theta in ((128, 1e6), (64, 5e5)):
        attrs = {"dim": dim, "theta": theta, "scaling": RopeScaling()}
        yield Case(f"base {theta:.0f}/{dim}", (positions,), attrs)


def _gated_mlp(rng: Rng) -> Iterator[Case]:
    """Yield the activation of Gemma."""
    x = rng.standard_normal((3, 40))
    gate, up, down = (rng.standard_normal(shape) / 6 for shape in
                      ((56, 40), (56, 40), (40, 56)))  # fmt: skip
    yield Case("3x40x56/gelu_tanh", (x, GatedMlp(gate, up, down)),
               {"activation": "gelu_tanh"})  # fmt: skip


def _gated_activation(rng: Rng) -> Iterator[Case]:
    for width in (1030, 4864, 28_672):
        gate, up = 4 * rng.standard_normal((2, 2, width))
        yield Case(f"2x{width}/silu", (gate, up), {"activation": "silu"})


def _set_token_bias(rng: Rng) -> Iterator[Case]:
    vocab = LARGE_VOCAB
    tables = empty_tables(groups=1, slots=3, max_blocks_per_seq=2, vocab=vocab)
    tables.token_counts[:] = rng.integers(0, 5, tables.token_counts.shape)
    tokens = (vocab - 1, 65_536, 40_000, 300)
    biases = [TokenBias(token, 3, float(rng.standard_normal())) for token in tokens]
    yield Case(f"vocabulary {vocab}", (token_bias_frame(2, biases), tables))


def _admit(rng: Rng) -> Iterator[Case]:
    width = 2048
    tables = empty_tables(groups=1, slots=301, max_blocks_per_seq=width, vocab=0)
    blocks = [int(x) for x in rng.integers(1, 4 * FURTHER, width)]
    frame = admit_frame(
        300, [blocks], groups=1, max_blocks_per_seq=width, length=100_000,
        last=LARGE_VOCAB, adapter=33,
    )  # fmt: skip
    yield Case(f"{width} blocks", (frame[None], tables))


def _make_step(rng: Rng) -> Iterator[Case]:
    """Rows of long contexts, with large tokens and block ids."""
    width, size = 2048, 64
    tables = empty_tables(groups=1, slots=4, max_blocks_per_seq=width, vocab=0)
    tables.blocks[0, 1:] = rng.integers(1, 4 * FURTHER, (3, width))
    tables.lengths[1:] = [100_000, 40_000, 0]
    tables.last[1:] = [LARGE_VOCAB, 65_536, 0]
    rows = [
        Row(1, [-1], [0.25]),
        Row(2, [-1], [0.75]),
        Row(3, [int(x) for x in rng.integers(32_768, LARGE_VOCAB, 5)]),
    ]
    updates = [BlockTableUpdate(0, 1, 1562, 2 * FURTHER)]
    bucket = Bucket(tokens=8, rows=4)
    message = step_frame(
        bucket, rows, updates, step=70_000, groups=1, block_size=size, decode_rows=2
    )
    attrs = {"bucket": bucket, "block_size": size}
    yield Case("context 100001", (message, tables), attrs)


def _verify(rng: Rng) -> Iterator[Case]:
    """Each row accepts another number of drafts, from none to all."""
    for width in WIDTHS:
        rows = [(slot, width) for slot in range(1, 6)]
        step, tables = verify_step(rng, rows=rows)
        starts = step.starts[:-1]
        tokens = np.append(step.tokens[1:], 7).astype(np.int32)
        tokens[starts + width - 1] = rng.integers(0, 11, len(rows))
        for row, wrong in enumerate((0, 1, width // 2, width - 2)):
            at = starts[row] + wrong
            tokens[at] = (tokens[at] + 1) % 11
        yield Case(f"width {width}", (tokens, step, tables), {"width": width})


def _expand_rows(rng: Rng) -> Iterator[Case]:
    for width in WIDTHS:
        rows = [(slot, width) for slot in range(1, 6)]
        yield Case(f"width {width}", verify_step(rng, rows=rows))


OTHERS: Final[Mapping[str, Callable[[Rng], Iterable[Case]]]] = {
    "write_kv": _write_kv,
    "embedding": _embedding,
    "score": _score,
    "mask_logits": _mask_logits,
    "sample": _sample,
    "soft_cap": _soft_cap,
    "gated_activation": _gated_activation,
    "gated_mlp": _gated_mlp,
    "rope_table": _rope_table,
    "set_token_bias": _set_token_bias,
    "admit": _admit,
    "make_step": _make_step,
    "verify": _verify,
    "expand_rows": _expand_rows,
}
"""Ops whose arguments depend on each other."""
