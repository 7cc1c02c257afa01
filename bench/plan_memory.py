"""Memory of real runs beside that of ``get_optimal_parallelism``, part by part.

    python bench/plan_memory.py --device cpu
    python bench/plan_memory.py --device cuda --shapes smollm2 8b --trained 350m

Each case runs in a process of its own, with random weights. A served case loads a
model, fills the cache of ``--batch`` sequences of ``--context`` tokens with prompts,
and decodes. A trained case is AdamW on a decoder of plain torch in float32, with
batches of ``--train-batch``. Measured are the resident memory of the process on the
CPU, and all used memory of the device on a GPU, on which nothing else may run. Stages
are printed, so that the planner's ``RUNTIMES`` can be compared. Exits with 1 where a
planned total is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from inl.executor.planner import get_optimal_parallelism

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
SHAPES = {
    "least": (256, 64, 128, 1, 1, 1, 64, True),
    "tiny": (2048, 256, 768, 4, 4, 2, 64, True),
    "smollm2": (49152, 576, 1536, 30, 9, 3, 64, True),
    "wide": (8192, 1536, 4096, 8, 12, 12, 128, False),
    "350m": (32000, 1024, 2816, 24, 16, 16, 64, False),
    "8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
}
DEFAULTS = {
    "cpu": {"shapes": ["smollm2", "wide"], "trained": ["tiny", "smollm2"],
            "batch": 2, "train_batch": 2, "context": 512, "dtype": "float32"},
    "cuda": {"shapes": ["smollm2", "8b"], "trained": ["wide", "350m"],
             "batch": 32, "train_batch": 4, "context": 2048, "dtype": "bfloat16"},
}  # fmt: skip
BOUND = 0.1


def facts(name: str) -> dict[str, int]:
    """The planner's arguments for a shape."""
    vocab, hidden, inner, layers, heads, kv_heads, head_dim, tied = SHAPES[name]
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    params = layers * (attention + 3 * hidden * inner + 2 * hidden)
    return {
        "model_size_params": params + (2 - tied) * vocab * hidden + hidden,
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "inner": inner, "vocab": vocab,
    }  # fmt: skip


def used(device: str) -> int:
    """Bytes in use now."""
    if device == "cpu":
        return host_bytes("VmRSS")
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def host_bytes(name: str) -> int:
    """A size from the status of this process, in bytes."""
    status = Path("/proc/self/status").read_text("utf-8")
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


class Peak:
    """Largest memory in use since the object was made."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cpu":
            Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> int:
        # On a GPU the allocator keeps what it had at most.
        return host_bytes("VmHWM") if self.device == "cpu" else used(self.device)


def serve(name: str, words: Any) -> dict[str, Any]:
    """Bytes in use after each stage of a served model."""
    device, batch, context = words.device, words.batch, words.context
    dtype = words.dtype
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.config import EngineConfig
    from inl.dtypes import HostArray, wrap
    from inl.engine.core import EngineCore
    from inl.executor.model_loader import LanguageModel
    from inl.models.llama import MODEL
    from inl.plugin import make_backend
    from inl.runners.local_runner import start_runner
    from inl.scheduling.plan import SchedulerConfig
    from inl.scheduling.request import Request
    from inl.spec.op import Spec
    from inl.spec.tree import leaves

    class Random(Checkpoint):
        """New random tensors at each call, so that none is shared."""

        path, eos_token_ids, chat_template = Path("random"), (), None

        def __init__(self, config: dict[str, Any], specs: dict[str, Spec]) -> None:
            self.config, self.specs = config, specs
            values = np.random.default_rng(0).standard_normal(1 << 20) * 0.03
            self.values = values.astype(np.float32)

        def names(self) -> list[str]:
            return list(self.specs)

        def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
            return self.specs[name].dtype, self.specs[name].shape

        def tensor(self, name: str) -> HostArray:
            shape = self.specs[name].shape
            data = np.resize(self.values, shape)
            if dtype == "float32":
                return wrap(data)
            bits = (data.view(np.uint32) >> 16).astype(np.uint16)
            return HostArray(bits, "bfloat16", shape)

        def tokenizer(self) -> Any:
            raise self.missing("tokenizer")

        def close(self) -> None:
            pass

    hf = dict(zip(FIELDS, SHAPES[name], strict=True)) | {
        "max_position_embeddings": 1 << 17
    }
    config = MODEL.config(hf)
    specs = {
        param.source: Spec(param.shape, dtype)
        for group in leaves(MODEL.weights(config))
        for param in group.params.values()
    }
    stages = {"start": used("cpu") if device == "cpu" else 0}
    backend = make_backend(device)
    if device != "cpu":
        import torch

        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    stages["runtime"] = used(device)
    engine = EngineConfig(
        backend=device, dtype=dtype, max_batch=batch, context=context,
        prefix_cache=False, check_weights=False, warm_up=False,
    )  # fmt: skip
    language = LanguageModel(MODEL, config, Random(hf, specs))
    runner = start_runner(language, backend, engine)
    stages["loaded"] = used(device)
    cached = sum(runner.limits.blocks) * runner.limits.block_size
    runner.warm_up()
    stages["programs"] = used(device)
    budget = runner.limits.token_budget
    core = EngineCore(
        runner,
        SchedulerConfig(token_budget=budget, context=context, prefix_cache=False),
    )
    peak = Peak(device)
    rng, decoded = np.random.default_rng(1), 8
    for _ in range(batch):
        prompt = rng.integers(3, hf["vocab_size"], context - decoded).tolist()
        core.add(Request(prompt, max_tokens=decoded, ignore_eos=True))
    while core.has_work:
        for event in core.step():
            if event.error is not None:
                raise event.error
    stages |= {"peak": peak.bytes(), "cached tokens": cached, "step tokens": budget}
    return stages


def decoder(name: str) -> Any:
    """A decoder of plain torch; its call returns the loss of ids [B, T]."""
    import torch
    from torch import nn
    from torch.nn import functional

    vocab, hidden, inner, layers, heads, kv_heads, dim, tied = SHAPES[name]

    def linear(a: int, b: int) -> nn.Linear:
        return nn.Linear(a, b, bias=False)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ParameterList(torch.ones(hidden) for _ in range(2))
            sizes = heads, kv_heads, kv_heads
            self.qkv = nn.ModuleList(linear(hidden, n * dim) for n in sizes)
            self.out = linear(heads * dim, hidden)
            self.gate, self.up = linear(hidden, inner), linear(hidden, inner)
            self.down = linear(inner, hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.rms_norm(x, (hidden,), self.norms[0])
            parts = (project(y).unflatten(-1, (-1, dim)) for project in self.qkv)
            q, k, v = (part.transpose(1, 2) for part in parts)
            y = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != kv_heads
            )
            x = x + self.out(y.transpose(1, 2).flatten(2))
            y = functional.rms_norm(x, (hidden,), self.norms[1])
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = nn.Parameter(torch.ones(hidden))
            self.head = linear(hidden, vocab)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(functional.rms_norm(x, (hidden,), self.norm))
            return functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
            )

    return Decoder()


def train(name: str, words: Any) -> dict[str, Any]:
    """Bytes in use after each stage of training, and at most."""
    import torch

    device = words.device

    stages = {"start": used("cpu") if device == "cpu" else 0}

    def made(name: str) -> Any:
        # On the device: in host memory it would leave holes.
        with torch.device(device):
            return decoder(name)

    def steps(model: Any, vocab: int, sizes: tuple[int, int]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        for _ in range(3):
            model(torch.randint(vocab, sizes, device=device)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    steps(made("least"), SHAPES["least"][0], (1, 16))
    stages["runtime"] = used(device)
    model = made(name)
    stages["loaded"] = used(device)
    peak = Peak(device)
    steps(model, SHAPES[name][0], (words.train_batch, words.context))
    return stages | {"peak": peak.bytes()}


def planned(name: str, training: bool, words: Any, measured: dict[str, Any]) -> Any:
    width = 4 if training or words.dtype == "float32" else 2
    return get_optimal_parallelism(
        num_devices=1, memory_per_device_gb=1e4, training=training,
        batch=words.train_batch if training else words.batch, context=words.context,
        bytes_per_param=width, kv_bytes_per_value=width,
        step_tokens=measured.get("step tokens"), device=words.device,
        tied=SHAPES[name][-1], **facts(name),
    )  # fmt: skip


def report(name: str, training: bool, words: Any, measured: dict[str, Any]) -> float:
    """Print the parts, and return planned / measured."""
    plan = planned(name, training, words, measured)
    total = measured["peak"]
    parts = {
        part: round(getattr(plan, f"{part}_bytes") / 1e6)
        for part in ("runtime", "weight", "kv", "activation", "gradient", "optimizer")
    }
    found = {
        key: round(value / 1e6) if "tokens" not in key else value
        for key, value in measured.items()
    }
    ratio = plan.total_bytes / total
    kind = "trained" if training else "served"
    batch = words.train_batch if training else words.batch
    dtype = "float32" if training else words.dtype
    print(f"{kind} {name}, {batch} x {words.context}, {dtype}, in MB:")
    print(f"  measured after each stage: {found}")
    print(f"  planned: {parts}, total {plan.total_bytes / 1e6:.0f}")
    print(f"  planned / measured: {ratio:.3f}", flush=True)
    return ratio


def run(name: str, kind: str, words: Any) -> dict[str, Any]:
    """Measure a case in a new process."""
    command = [
        sys.executable, __file__, "--device", words.device, "--case", kind, name,
        "--batch", str(words.batch), "--train-batch", str(words.train_batch),
        "--context", str(words.context), "--dtype", words.dtype,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=sorted(DEFAULTS))
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES))
    parser.add_argument("--trained", nargs="*", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--train-batch", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    for key, value in DEFAULTS[words.device].items():
        if getattr(words, key) is None:
            setattr(words, key, value)
    if words.case:
        kind, name = words.case
        print(json.dumps((train if kind == "train" else serve)(name, words)))
        return 0
    cases = [(name, "serve") for name in words.shapes]
    cases += [(name, "train") for name in words.trained]
    ratios = [
        report(name, kind == "train", words, run(name, kind, words))
        for name, kind in cases
    ]
    off = max(abs(math.log(ratio)) for ratio in ratios)
    print(f"largest difference: {math.expm1(off):.1%}, accepted: {BOUND:.0%}")
    return 1 if off > math.log1p(BOUND) else 0


if __name__ == "__main__":
    sys.exit(main())
