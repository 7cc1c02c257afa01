"""The persistent kernel compiles, without a GPU; what it accepts, and its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inl.errors import DeviceError
from inl.models import gemma2, llama
from inl.models.blocks import Attention, Mlp
from inl.models.views import View
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl_cuda.one_row import compiler
from inl_cuda.persistent import model as persistent
from inl_cuda.persistent import program
from inl_cuda.persistent.model import RowCarry, describe_step, persistent_model
from inl_cuda.persistent.program import PersistentStep
from inl_cuda.persistent.shape import (
    SHARED,
    Launch,
    Shape,
    fixed_bytes,
    options_of,
    plan_launch,
    refuse_config,
    refuse_state,
    shape_of,
    threads_of,
)
from inl_cuda.persistent.weights import pack, pack_down, pack_out, refuse_weights
from inl_torch.eager.linear import StackedQkv
from inl_torch.eager.mlp import StackedMlp

SMOLLM2 = Shape(576, 30, 9, 3, 1536, 49152, 16, 512)
SMALL = Shape(256, 2, 4, 4, 1152, 1002, 16, 100)
FIELDS = {
    "vocab_size": 1002, "hidden_size": 256, "intermediate_size": 1152,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "tie_word_embeddings": True, "hidden_act": "silu",
    "max_position_embeddings": 1600,
}  # fmt: skip
CONFIG = replace(llama.config(FIELDS), dtype="bfloat16")
LIMITS = Limits(2, (101,), 16, 100, 1002)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def random_weights(shape: Shape = SMALL) -> llama.Weights:
    table = numbers(shape.vocab, shape.hidden)
    rows, keys = (shape.heads + 2 * shape.kv_heads) * 64, shape.kv_heads * 64

    def layer() -> llama.Layer:
        qkv = numbers(rows, shape.hidden)
        return llama.Layer(
            Attention(
                Norm(numbers(shape.hidden)), StackedQkv(qkv, qkv[-2 * keys : -keys]),
                Linear(numbers(shape.hidden, shape.heads * 64)),
            ),
            Mlp(
                Norm(numbers(shape.hidden)),
                StackedMlp(numbers(2 * shape.inner, shape.hidden),
                           numbers(shape.hidden, shape.inner)),
            ),
        )  # fmt: skip

    layers = tuple(layer() for _ in range(shape.layers))
    norm = Norm(numbers(shape.hidden))
    return llama.Weights(Embedding(table), layers, norm, Linear(table))


@pytest.mark.parametrize("shape", [
    SMOLLM2, SMALL, Shape(320, 1, 14, 2, 1792, 514, 32, 64),
    Shape(960, 62, 1, 1, 1920, 2048, 16, 512), Shape(64, 3, 15, 5, 1440, 30, 8, 99),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("wide", [0, 1])
def test_it_compiles(
    shape: Shape, wide: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INL_CACHE", str(tmp_path))
    launch = plan_launch(shape, 16)
    assert isinstance(launch, Launch), launch
    options = options_of(shape, launch) | {
        "WIDE_POSITIONS": wide, "WIDE_TABLE": 1 - wide, "WIDE_WRITES": wide, "PDL": wide
    }  # fmt: skip
    defined = tuple(f"-D{key}={value}" for key, value in options.items())
    code = compiler.compiled(program.source(), defined, "sm_90a")
    assert code.startswith(b"\x7fELF")


def test_launches_fit_the_chip() -> None:
    launch = plan_launch(SMOLLM2, 15)
    assert launch == Launch(12, 4, 157696)
    assert launch.blocks == 96
    assert threads_of(SMOLLM2, launch) == 512
    for layers in (1, 30, 62):
        for hidden in range(64, 1100, 64):
            shape = SMOLLM2._replace(hidden=hidden, layers=layers)
            launch = plan_launch(shape, 16)
            if isinstance(launch, Launch):
                units = shape.inner // launch.blocks
                fixed = fixed_bytes(shape, units, launch.batch)
                assert launch.shared + fixed <= SHARED
                assert 32 * units >= hidden // 2


@pytest.mark.parametrize(("given", "resident", "reason"), [
    ({}, 11, "equal parts"),  # 1536 units are 32 x 12 x 4, or 32 x 16 x 3
    ({}, 8, "takes 8 heads at most, found 9"),
    ({"hidden": 600}, 16, "whole tiles"),
    ({"vocab": 49151}, 16, "whole tiles"),
    ({"layers": 63}, 16, "takes 62 layers at most, found 63"),
    ({"width": 8192}, 16, "takes 8176 blocks of a sequence, found 8192"),
    ({"hidden": 896, "inner": 4864, "heads": 14, "kv_heads": 2}, 16, "equal parts"),
    ({"hidden": 960, "inner": 2560, "heads": 15, "kv_heads": 5}, 15, "equal parts"),
    ({"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8}, 16, "16 heads"),
])  # fmt: skip
def test_sizes_that_do_not_fit(
    given: dict[str, int], resident: int, reason: str
) -> None:
    found = plan_launch(SMOLLM2._replace(**given), resident)
    assert isinstance(found, str)
    assert reason in found


def test_models_that_are_taken() -> None:
    assert refuse_config(llama.MODEL, CONFIG) is None
    assert refuse_config(replace(llama.MODEL, state=len), CONFIG) is None
    assert refuse_state(llama.MODEL.state(CONFIG)) is None
    assert shape_of(CONFIG, 16, 100) == SMALL


@pytest.mark.parametrize(("change", "reason"), [
    ({"dtype": "float16"}, "takes bfloat16, found float16"),
    ({"activation": "gelu_tanh"}, "takes silu, found gelu_tanh"),
    ({"head_dim": 128}, "takes heads of 64 elements, found 128"),
    ({"views": (View(window=100), View())}, "full attention"),
    ({"views": (View(rotated=False),) * 2}, "full attention"),
    ({"qkv_bias": True}, "no biases"), ({"out_bias": True}, "no biases"),
    ({"mlp_bias": True}, "no biases"), ({"head_norm": True}, "norms of heads"),
], ids=str)  # fmt: skip
def test_configs_that_are_refused(change: dict[str, Any], reason: str) -> None:
    found = refuse_config(llama.MODEL, replace(CONFIG, **change))
    assert reason in str(found)


def test_models_and_caches_that_are_refused() -> None:
    other = "takes models of the Llama family"
    assert refuse_config(gemma2.MODEL, CONFIG) == other
    assert refuse_config(replace(llama.MODEL, head=len), CONFIG) == other
    (paged,) = llama.MODEL.state(CONFIG)
    assert isinstance(paged, Paged)
    for state in ((paged, paged), (paged, Slotted("v", (1,), "float32", "replay"))):
        assert refuse_state(state) == "takes one cache of keys and values"
    narrow = paged._replace(dtype="float8_e4m3")
    assert refuse_state((narrow,)) == "takes a cache in bfloat16, found float8_e4m3"


def test_weights_that_are_refused() -> None:
    weights = random_weights()
    assert refuse_weights(weights) is None
    first, second = weights.layers
    bias, table = torch.zeros(256), weights.embed.weight
    biased = first._replace(
        attention=first.attention._replace(out=Linear(numbers(256, 256), bias))
    )
    normed = first._replace(
        attention=first.attention._replace(q_norm=Norm(numbers(64)))
    )
    packed = first._replace(mlp=first.mlp._replace(mlp=weights.head))
    for layer, reason in (
        (biased, "biases"), (normed, "norms of heads"), (packed, "gate_up_stacked"),
    ):  # fmt: skip
        assert reason in str(refuse_weights(weights._replace(layers=(layer, second))))
    assert refuse_weights(weights._replace(head=Linear(table, bias))) is not None
    wide = weights._replace(head=Linear(table.float()))
    assert refuse_weights(wide) == "takes weights in bfloat16"
    beside = numbers(1002 * 256 + 1)[1:].view(1002, 256)
    assert "16 bytes" in str(refuse_weights(weights._replace(head=Linear(beside))))


def test_packed_output_projection() -> None:
    heads, hidden = 3, 64
    matrix = torch.arange(hidden * heads * 64).view(hidden, heads * 64)
    packed = pack_out(matrix, heads)
    assert packed.shape == (heads, 8, 2, hidden // 8, 4, 8)
    for head, rank, half, row, quarter, at in (
        (0, 0, 0, 0, 0, 0), (2, 7, 1, 7, 3, 7), (1, 3, 0, 5, 2, 6), (1, 6, 1, 2, 1, 3),
    ):  # fmt: skip
        column = head * 64 + quarter * 16 + half * 8 + at
        expected = matrix[rank * (hidden // 8) + row, column]
        assert packed[head, rank, half, row, quarter, at] == expected
    assert torch.equal(packed.flatten().sort()[0], matrix.flatten())


def test_packed_down_projection() -> None:
    hidden, inner, blocks, units = 64, 96, 8, 12
    matrix = torch.arange(hidden * inner).view(hidden, inner)
    packed = pack_down(matrix, blocks)
    assert packed.shape == (blocks, units // 4, hidden // 2, 8)
    for block in (0, 3, 7):
        for part, pair, at in ((0, 0, 0), (1, 5, 3), (1, 31, 4), (2, 17, 7)):
            number = part * 8 + at  # of two rows
            row, unit = 2 * pair + number // units, block * units + number % units
            assert packed[block, part, pair, at] == matrix[row, unit]
    assert torch.equal(packed.flatten().sort()[0], matrix.flatten())


def test_copies_of_all_layers() -> None:
    weights, launch = random_weights(), plan_launch(SMALL, 16)
    assert isinstance(launch, Launch)
    packed = pack(weights, SMALL, launch)
    second = weights.layers[1]
    out = pack_out(second.attention.out.weight, SMALL.heads)
    assert torch.equal(packed.out[1].flatten(), out.flatten())
    down = pack_down(second.mlp.mlp.down, launch.blocks)
    assert torch.equal(packed.down[1].flatten(), down.flatten())
    assert packed.gains.dtype == torch.float32
    assert torch.equal(packed.gains[2], second.attention.norm.weight.float())
    assert torch.equal(packed.gains[4], weights.norm.weight.float())


class Launched:
    """A kernel that is not compiled; records its launches."""

    resident = 15

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.allowed = 0

    def allow_shared(self, size: int) -> None:
        self.allowed = size

    def resident_clusters(
        self, programs: int, threads: int, shared: int, cluster: int
    ) -> int:
        assert (programs % cluster, threads % 32) == (0, 0)
        assert self.allowed == shared
        return self.resident

    def launch(
        self, programs: int, threads: int, shared: int, arguments: Any, *,
        cluster: int, pdl: bool, cooperative: bool,
    ) -> None:  # fmt: skip
        for one, kind in zip(arguments, program.TYPES, strict=True):
            kind(one)  # raises for a value of another type
        assert cooperative, "blocks wait for each other"
        self.launches.append((programs, threads, shared, cluster, pdl))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    kernel = Launched()
    monkeypatch.setattr(program, "_load", lambda *_: kernel)
    return kernel


class FakeOps:
    """Ops of a step of some tokens, without kernels."""

    block_size = 16

    def __init__(self, tokens: int) -> None:
        self.bucket = Bucket(tokens, tokens)

    def embedding(self, tokens: torch.Tensor, w: Embedding) -> torch.Tensor:
        table: torch.Tensor = w.weight
        return table[tokens]

    def rope_table(self, positions: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        return torch.ones(len(positions), 32), torch.zeros(len(positions), 32)

    def zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def step_of(tokens: int) -> Any:
    return SimpleNamespace(
        tokens=torch.arange(tokens), positions=torch.arange(tokens),
        blocks=torch.zeros(1, tokens, 100, dtype=torch.int32),
        writes=torch.zeros(1, tokens, dtype=torch.int64),
    )  # fmt: skip


def carried(model: Any, weights: Any, tokens: int) -> Any:
    """Compute a step up to the head."""
    ops, step = FakeOps(tokens), step_of(tokens)
    carry = model.embed(ops, CONFIG, weights, step)
    if not isinstance(carry, RowCarry):
        return carry
    caches = tuple(Cache(*(numbers(5, 16, 4, 64) for _ in "kv")) for _ in "ab")
    state = State(caches, {}, None)
    for index, w in enumerate(weights.layers):
        carry, after = model.layer(ops, CONFIG, w, carry, step, state, index=index)
        assert after is state
    assert carry.caches == caches
    return model.head(ops, CONFIG, weights, carry, step)


def test_one_row_is_one_launch(launched: Launched) -> None:
    model, weights = persistent_model(llama.MODEL, pdl=True), random_weights()
    assert model.prunes_last_layer == llama.MODEL.prunes_last_layer
    for _ in range(2):
        logits = carried(model, weights, 1)
        assert (logits.shape, logits.dtype) == ((1, 1002), torch.float32)
    assert launched.launches == [(96, 384, launched.allowed, 8, True)] * 2
    assert not isinstance(carried(model, weights, 2), RowCarry)
    assert len(launched.launches) == 2


def test_addresses_follow_the_caches(launched: Launched) -> None:
    weights, launch = random_weights(), plan_launch(SMALL, 16)
    assert isinstance(launch, Launch)
    step = PersistentStep(weights, SMALL, launch, eps=1e-5, scale=0.125, pdl=False)
    for _ in range(2):
        caches = [Cache(*(numbers(5, 16, 4, 64) for _ in "kv")) for _ in "ab"]
        table = step._layer_pointers(caches)
        assert table is step._layer_pointers(caches)
        second = weights.layers[1]
        assert table[1].tolist() == [
            second.attention.qkv.weight.data_ptr(), second.mlp.mlp.gate_up.data_ptr(),
            caches[1].k.data_ptr(), caches[1].v.data_ptr(),
        ]  # fmt: skip


@pytest.mark.parametrize("why", ["chip", "compiler", "memory", "weights"])
def test_otherwise_steps_are_graphs(
    why: str, launched: Launched, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(error: Exception) -> None:
        raise error

    weights = random_weights()
    if why == "chip":
        launched.resident = 3
    elif why == "compiler":
        monkeypatch.setattr(program, "_load", lambda *_: fail(DeviceError("NVRTC")))
    elif why == "memory":
        full = torch.cuda.OutOfMemoryError("full")
        monkeypatch.setattr(persistent, "PersistentStep", lambda *_, **__: fail(full))
    else:
        weights = weights._replace(head=Linear(weights.head.weight.float()))
    with caplog.at_level("INFO"):
        model = persistent_model(llama.MODEL, pdl=True)
        for _ in range(2):
            assert not isinstance(carried(model, weights, 1), RowCarry)
    assert caplog.text.count("steps of one row are a graph of kernels: ") == 1
    assert not launched.launches


def test_what_explain_prints() -> None:
    weights = random_weights()

    def described(config: Any, bucket: Bucket) -> str:
        return describe_step(llama.MODEL, config, weights, bucket, LIMITS)

    one = Bucket(1, 1, sampler="sample")
    assert described(CONFIG, one) == "one persistent kernel of 96 blocks"
    assert described(CONFIG, Bucket(2, 2)).endswith("takes steps of one token")
    wide = replace(CONFIG, dtype="float32")
    assert described(wide, one) == (
        "by op; not one persistent kernel: takes bfloat16, found float32"
    )
