"""bench/plan_memory.py: its runs, and the planner's bytes beside those of tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import plan_memory
import pytest

from inl.executor.planner import get_optimal_parallelism

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

BATCH, CONTEXT = 2, 64


def saved_bytes(model, ids):
    """Bytes that the backward pass keeps, without parameters; each storage once."""
    params = {each.untyped_storage().data_ptr() for each in model.parameters()}
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids)
    storages = {at: each.untyped_storage() for at, each in held.items()}
    return sum(each.nbytes() for at, each in storages.items() if at not in params)


def test_planned_training_is_what_torch_holds():
    name = "tiny"
    model = plan_memory.decoder(name)
    vocab = plan_memory.SHAPES[name][0]
    ids = torch.randint(vocab, (BATCH, CONTEXT))
    plan = get_optimal_parallelism(
        num_devices=1, memory_per_device_gb=80, training=True, batch=BATCH,
        context=CONTEXT, bytes_per_param=4, **plan_memory.facts(name),
    )  # fmt: skip
    # Of the four arrays of logits only their logarithms outlive the forward pass.
    logits = 4 * BATCH * CONTEXT * vocab
    kept = plan.activation_bytes - 3 * logits
    assert kept == pytest.approx(saved_bytes(model, ids), rel=0.1)

    optimizer = torch.optim.AdamW(model.parameters())
    model(ids).backward()
    optimizer.step()
    parameters = list(model.parameters())
    state = [each for moments in optimizer.state.values() for each in moments.values()]
    assert plan.weight_bytes == sum(each.nbytes for each in parameters)
    assert plan.gradient_bytes == sum(each.grad.nbytes for each in parameters)
    assert plan.optimizer_bytes == pytest.approx(
        sum(each.nbytes for each in state), abs=100 * len(parameters)
    )


@pytest.mark.parametrize(
    ("device", "kernel"), [("cuda", "MATH"), ("cpu", "FLASH_ATTENTION")]
)
def test_grouped_heads_in_float32_are_fused_on_the_cpu_only(device, kernel):
    name, context = "tiny", 512
    model = plan_memory.decoder(name)
    vocab = plan_memory.SHAPES[name][0]
    plan = get_optimal_parallelism(
        num_devices=1, memory_per_device_gb=80, training=True, batch=1,
        context=context, bytes_per_param=4, device=device, **plan_memory.facts(name),
    )  # fmt: skip
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        kept = saved_bytes(model, torch.randint(vocab, (1, context)))
    assert plan.activation_bytes - 12 * context * vocab == pytest.approx(kept, rel=0.05)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", ["serve", "train"])
def test_a_small_run_needs_what_is_planned(kind):
    script = Path(plan_memory.__file__)
    words = ["--device", "cpu", "--shapes", "--trained"]
    words.insert(-1 if kind == "serve" else len(words), "tiny")
    done = subprocess.run(
        [sys.executable, script, *words, "--context", "256"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("largest difference: "), done.stdout + done.stderr
    # The runtime, most of so small a run, depends on the release of torch.
    assert float(last.split()[2].rstrip("%,")) < 40, done.stdout
