"""A step of SmolLM2's shape for one row as one program on the whole chip.

    python bench/cuda_persistent.py [--clusters 12 16] [--lengths 128 2000] [--parts]

A prototype (`cuda_persistent.cu`) with random weights in bfloat16. Compares the hidden
state, the logits and the cache with float32 in torch, then prints medians of replayed
graphs of one step each. ``--parts`` also times the step without its waits, its products
or its attention, without layers, and barriers alone; their results are not checked.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from cuda.bindings import driver
from cuda_one_row import timed
from cuda_steps import copy_rate

from inl_cuda.one_row.compiler import (
    ATTRIBUTES,
    POINTER,
    Function,
    compiled,
    launch_config,
)

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM = 576, 30, 9, 3, 64
UNITS, VOCAB, RANKS, PAGE, EPS = 1536, 49152, 8, 16, 1e-5
LONGEST: Final = 4096
KEYS: Final = 256
"""Keys of a program that are copied into shared memory ahead."""

BOUNDS: Final = {"hidden": 1e-4, "logits": 1e-4, "key": 3e-3, "value": 3e-3, "token": 0}
"""Largest relative errors. Both sides multiply and add in float32; only what the cache
gets is rounded to bfloat16."""

TYPES: Final = (*[POINTER] * 15, ctypes.c_int)
PARTS: Final = {
    "exchanges and attention": {"PRODUCTS": 0},
    "exchanges": {"PRODUCTS": 0, "ATTENTION": 0},
    "products and attention": {"WAITS": 0},
    "products": {"WAITS": 0, "ATTENTION": 0},
    "head": {"LAYERS": 0},
}


class Model(NamedTuple):
    """Random weights, and a cache of random keys and values."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    embed: torch.Tensor
    gains: torch.Tensor
    turns: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor


def random_model() -> Model:
    def make(*shape: int, scale: float = 0.04) -> torch.Tensor:
        return torch.randn(shape, device="cuda").mul_(scale).bfloat16()

    angles = torch.arange(LONGEST, device="cuda")[:, None] / 1e4 ** (
        torch.arange(DIM // 2, device="cuda") / (DIM // 2)
    )
    pages = LONGEST // PAGE
    cache = LAYERS, pages, PAGE, KV_HEADS, DIM
    return Model(
        make(LAYERS, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        make(LAYERS, HIDDEN, HIDDEN), make(LAYERS, 2 * UNITS, HIDDEN),
        make(LAYERS, HIDDEN, UNITS), make(VOCAB, HIDDEN),
        1 + make(2 * LAYERS + 1, HIDDEN, scale=0.1).float(),
        torch.cat([angles.cos(), angles.sin()], 1).contiguous(),
        make(*cache, scale=1), make(*cache, scale=1),
        torch.randperm(pages, device="cuda").int(),
    )  # fmt: skip


def packed(m: Model, clusters: int) -> list[torch.Tensor]:
    """Return the weights of layers in the order in which programs read them."""
    blocks, group = clusters * RANKS, HEADS // KV_HEADS
    q, k, v = (
        part.view(LAYERS, -1, DIM, HIDDEN)
        for part in m.qkv.split([n * DIM for n in (HEADS, KV_HEADS, KV_HEADS)], 1)
    )
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    # Rows that rotate together are adjacent.
    qkv = torch.stack([q, k, v], 2).unflatten(3, (2, DIM // 2)).transpose(3, 4)
    out = m.out.view(LAYERS, RANKS, HIDDEN // RANKS, HEADS, 4, 2, 8)
    out = out.permute(0, 3, 1, 5, 2, 4, 6)  # 8 columns by 4 threads a row, twice
    up = m.up.view(LAYERS, 2, UNITS, HIDDEN).transpose(1, 2)
    units = UNITS // blocks
    down = m.down.view(LAYERS, HIDDEN, blocks, units).transpose(1, 2)
    # Two rows by a thread, 8 numbers of all threads adjacent.
    down = down.reshape(LAYERS, blocks, HIDDEN // 2, units // 4, 8).transpose(2, 3)
    return [each.contiguous() for each in (qkv, out, up, down)]


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean() + EPS).rsqrt() * gain


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate heads [heads, DIM]."""
    (first, second), (cosine, sine) = x.chunk(2, 1), turns.chunk(2)
    return torch.cat(
        [first * cosine - second * sine, second * cosine + first * sine], 1
    )


def reference(m: Model, token: int, count: int) -> dict[str, torch.Tensor]:
    """The step in float32: hidden state, logits, and the last layer's key and value."""
    x, group = m.embed[token].float(), HEADS // KV_HEADS
    for layer in range(LAYERS):
        y = m.qkv[layer].float() @ normed(x, m.gains[2 * layer])
        q, k, v = y.view(-1, DIM).split([HEADS, KV_HEADS, KV_HEADS])
        q, k = rotated(q, m.turns[count]), rotated(k, m.turns[count])
        keys, values = (
            torch.cat([cache[layer][m.table.long()].flatten(0, 1)[:count], new[None]])
            .float()
            .repeat_interleave(group, 1)
            for cache, new in ((m.k, k), (m.v, v))
        )
        weights = torch.einsum("hd,khd->hk", q, keys).mul(DIM**-0.5).softmax(1)
        attended = torch.einsum("hk,khd->hd", weights, values).flatten()
        x = x + m.out[layer].float() @ attended
        gate, up = (m.up[layer].float() @ normed(x, m.gains[2 * layer + 1])).chunk(2)
        x = x + m.down[layer].float() @ (torch.nn.functional.silu(gate) * up)
    logits = m.embed.float() @ normed(x, m.gains[-1])
    return {"hidden": x, "logits": logits, "key": k, "value": v}


class Program:
    """The compiled step, and what it reads and writes."""

    def __init__(self, m: Model, weights: list[torch.Tensor], **options: int) -> None:
        given = {
            "CLUSTERS": 12, "LAYERS": LAYERS, "KEYS": KEYS, "WAITS": 1,
            "PRODUCTS": 1, "ATTENTION": 1, **options,
        }  # fmt: skip
        self.clusters = given["CLUSTERS"]
        self.blocks = self.clusters * RANKS
        units = UNITS // self.blocks
        self.threads = 32 * units
        self.shared = 24 * 2 * HIDDEN + HIDDEN // RANKS * DIM * 2
        self.shared += units * 6 * HIDDEN + KEYS * DIM * 4
        source = Path(__file__).with_suffix(".cu").read_text()
        defined = tuple(f"-D{key}={value}" for key, value in given.items())
        self.code = compiled(source, defined, "sm_90a")
        place = torch.device("cuda", 0)
        self.step = Function(self.code, "step", TYPES, place)
        self.step.allow_shared(self.shared)
        self.state = torch.zeros(3, dtype=torch.int32, device="cuda")
        self.slots = torch.zeros(
            4 * self.blocks * (HIDDEN // RANKS), dtype=torch.int64, device="cuda"
        )
        self.bests = torch.zeros(2 * self.blocks, dtype=torch.int64, device="cuda")
        self.hidden = torch.full((HIDDEN,), torch.nan, device="cuda")
        self.logits = torch.full((VOCAB,), torch.nan, device="cuda")
        self.tensors = (
            *weights, m.embed, m.gains, m.turns, m.k, m.v, m.table, self.state,
            self.slots, self.bests, self.hidden, self.logits,
        )  # fmt: skip

    def resources(self) -> str:
        """Registers of a thread, and its bytes of local memory."""
        names = "NUM_REGS", "LOCAL_SIZE_BYTES"
        kinds = (getattr(ATTRIBUTES, f"CU_FUNC_ATTRIBUTE_{name}") for name in names)
        used = [driver.cuFuncGetAttribute(k, self.step._function)[1] for k in kinds]
        return f"{used[0]} registers, {used[1]} bytes of local memory"

    def resident(self) -> int:
        """Clusters that run at the same time."""
        config = launch_config(
            self.blocks, self.threads, self.shared, cluster=RANKS, pdl=False
        )
        code, clusters = driver.cuOccupancyMaxActiveClusters(
            self.step._function, config
        )
        return 0 if code else clusters

    def place(self, token: int, count: int) -> None:
        """Set the token and how many the cache has."""
        self.state[1:] = torch.tensor([token, count])

    def run(self) -> None:
        arguments = *(each.data_ptr() for each in self.tensors), LONGEST // PAGE
        self.step.launch(
            self.blocks, self.threads, self.shared, arguments, cluster=RANKS, pdl=False
        )


def errors(m: Model, program: Program, count: int) -> dict[str, float]:
    """Relative errors of a step after ``count`` tokens, and if its token is right."""
    token = 11 + count
    program.place(token, count)
    program.run()
    torch.cuda.synchronize()
    exact = reference(m, token, count)
    page, offset = int(m.table[count // PAGE]), count % PAGE
    actual = {
        "hidden": program.hidden, "logits": program.logits,
        "key": m.k[-1, page, offset], "value": m.v[-1, page, offset],
    }  # fmt: skip
    relative = {
        name: float((x.float() - exact[name]).norm() / exact[name].norm())
        for name, x in actual.items()
    }
    return relative | {"token": float(program.state[1] != exact["logits"].argmax())}


def barrier_us(program: Program, kind: int, count: int = 1000) -> float:
    """Microseconds of a barrier of the grid (0) or of clusters (1)."""
    types = POINTER, *[TYPES[-1]] * 2
    function = Function(program.code, "barriers", types, torch.device("cuda", 0))
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run() -> None:
        counter.zero_()
        function.launch(
            program.blocks, program.threads, 0, (counter.data_ptr(), count, kind),
            cluster=RANKS, pdl=False,
        )  # fmt: skip

    return timed(run) / count


def times(program: Program, lengths: Sequence[int]) -> str:
    """Microseconds of a step after so many tokens."""
    results = []
    for count in lengths:
        program.place(1, count)
        results.append(f"{timed(program.run):.1f}")
    return " / ".join(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", type=int, nargs="+", default=[12])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 2000])
    parser.add_argument("--checked", type=int, nargs="+", default=[1, 131, 2000, 3001])
    parser.add_argument("--parts", action="store_true")
    given = parser.parse_args()
    m = random_model()
    print(f"{torch.cuda.get_device_name()}, copies {copy_rate() / 1e12:.2f} TB/s")
    failed = False
    for clusters in given.clusters:
        weights = packed(m, clusters)
        program = Program(m, weights, CLUSTERS=clusters)
        resident = program.resident()
        print(f"{clusters} clusters of {resident}, {program.resources()}", flush=True)
        if resident < clusters:  # those that run would wait for the others
            continue
        for count in (*given.checked, *given.lengths):
            relative = errors(m, program, count)
            failed |= not all(relative[name] <= BOUNDS[name] for name in BOUNDS)
            shown = ", ".join(f"{name} {x:.1e}" for name, x in relative.items())
            print(f"  errors after {count}: {shown}", flush=True)
        print(f"  us/step: {times(program, given.lengths)}", flush=True)
        if given.parts:
            for name, without in PARTS.items():
                part = Program(m, weights, CLUSTERS=clusters, **without)
                print(f"  {name} alone: {times(part, given.lengths)}", flush=True)
            for kind, name in enumerate(("grid", "cluster")):
                us = barrier_us(program, kind)
                print(f"  barrier of the {name}: {us:.2f} us", flush=True)
    print("FAILED" if failed else "all errors within the bound")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
