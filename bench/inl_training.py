"""Times of training steps: ours and the plain formula, eager and compiled.

    python bench/inl_training.py [--device cuda] [--dtype bfloat16] [--rounds 20]

A step is a forward and a backward pass. Ours and the formula are timed in turn, each
round in the other order; each row prints the medians and the medians of the rounds'
ratios of ours to the formula's, below 1 where ours is faster. On the CPU times are of
the processor, which other work on the machine disturbs less: use ``--threads 1``.
Compiled steps use ``torch.compile(fullgraph=True)``. Losses of both are compared first.
The formula of experts computes every expert for all tokens, since a loop over the
chosen ones cannot be compiled as one graph.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn import functional

from inl import inl_dynamics, inl_dynamics_step, moe

SHAPES = {
    "cuda": [(8, 2048, 4096), (1, 128, 4096)],
    "cpu": [(4, 128, 512), (1, 8, 512)],
}
"""Of INL dynamics, by device: large and small."""

MIXTURES = {"cuda": (8192, 1024, 2048, 8, 2), "cpu": (512, 128, 256, 8, 2)}
"""Tokens, hidden and inner width, experts, experts per token."""

DT = 0.1


def formula(x, v, mu, alpha, beta, gate):
    v = alpha * v - beta * (x - mu)
    return x + DT * gate * v, v


def controlled_formula(x, v, mu, controller):
    alpha, beta, gate = controller.float().chunk(3, -1)
    found = formula(
        x.float(), v.float(), mu.float(), alpha.sigmoid(), functional.softplus(beta),
        gate.sigmoid(),
    )  # fmt: skip
    return [each.to(x.dtype) for each in found]


def dynamics(shape, like):
    def new(*size):
        return torch.randn(size, **like)

    operands = [new(*shape), new(*shape), new(shape[-1])]
    coefs = [new(*shape) for _ in range(3)]
    yield f"dynamics {list(shape)}", inl_dynamics, formula, operands + coefs
    controller = new(*shape[:-1], 3 * shape[-1])
    name = f"controlled {list(shape)}"
    yield name, inl_dynamics_step, controlled_formula, [*operands, controller]


def mixture(sizes, like):
    tokens, hidden, inner, count, k = sizes

    def ours(x, logits, *w):
        ids, weights = moe.route(logits, k=k)
        return (moe.experts(x, ids, weights, w),)

    def every(x, logits, gate, up, down):
        best, ids = logits.float().softmax(-1).topk(k)
        best = best / best.sum(-1, keepdim=True)
        shares = torch.zeros_like(logits, dtype=best.dtype).scatter(1, ids, best)
        y = functional.silu(x @ gate.mT) * (x @ up.mT)
        y = (y @ down.mT) * shares.t().unsqueeze(-1)
        return (y.sum(0).to(x.dtype),)

    wide = (count, inner, hidden)

    def new(*size):
        return torch.randn(size, **like) * size[-1] ** -0.5

    weights = [new(*wide), new(*wide), new(count, hidden, inner)]
    operands = [torch.randn(tokens, size, **like) for size in (hidden, count)]
    yield f"experts {list(sizes)}", ours, every, operands + weights


def stepper(run, operands):
    def loss(*given):
        return sum(each.float().square().mean() for each in run(*given))

    def step(call=loss):
        value = call(*operands)
        torch.autograd.grad(value, operands)
        return value.detach()

    compiled = torch.compile(loss, fullgraph=True)
    return step, lambda: step(compiled)


def measure(ways, device, rounds):
    times = {name: [] for name in ways}
    clock = time.process_time if device == "cpu" else time.perf_counter
    for turn in range(rounds + 3):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            began = clock()
            ways[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(1e3 * (clock() - began))
    return times


def ratio(own, other):
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def row(name, ours, plain, operands, device, rounds):
    torch.compiler.reset()
    for each in operands:
        each.requires_grad_()
    own, own_compiled = stepper(ours, operands)
    formula_step, formula_compiled = stepper(plain, operands)
    wanted = formula_step()
    for found in (own(), own_compiled(), formula_compiled()):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=1e-3)
    ways = {"ours": own, "formula": formula_step, "ours compiled": own_compiled,
            "formula compiled": formula_compiled}  # fmt: skip
    # By pairs, each way after itself as often as after the other: the ways before one
    # leave caches that change its time.
    found = {}
    for pair in (("ours", "formula"), ("ours compiled", "formula compiled")):
        found |= measure({name: ways[name] for name in pair}, device, rounds)
    times = "  ".join(
        f"{way} {statistics.median(each):.3f} ms" for way, each in found.items()
    )
    eager = ratio(found["ours"], found["formula"])
    compiled = ratio(found["ours compiled"], found["formula compiled"])
    print(f"{name}: {times}  ratio {eager:.2f}, compiled {compiled:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=sorted(SHAPES))
    parser.add_argument("--dtype", help="bfloat16 on cuda, else float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="1 beside other work")
    parser.add_argument("--cases", default="", help="Start of the names of cases.")
    given = parser.parse_args()
    default = "bfloat16" if given.device == "cuda" else "float32"
    dtype = getattr(torch, given.dtype or default)
    like = {"device": given.device, "dtype": dtype}
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    for shape in SHAPES[given.device]:
        for case in dynamics(shape, like):
            if not case[0].startswith(given.cases):
                continue
            row(*case, given.device, given.rounds)
    for case in mixture(MIXTURES[given.device], like):
        if not case[0].startswith(given.cases):
            continue
        row(*case, given.device, given.rounds)


if __name__ == "__main__":
    main()
