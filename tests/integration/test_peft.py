"""Logits with an adapter equal those of ``peft`` on the same files."""

from __future__ import annotations

import numpy as np
import pytest

from inl.adapters.registry import check_adapter
from inl.config import EngineConfig
from inl.dtypes import widen
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.protocol.runner import AdapterSource
from inl.runners.local_runner import start_runner
from inl.spec.message import admit_frame
from inl.testing.play import one_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
IDS = [3, 17, 60, 2, 41, 41, 9, 77, 5, 30]
VARIANTS = {
    "plain": {"r": 4, "lora_alpha": 6},
    "rslora": {"r": 8, "lora_alpha": 3, "use_rslora": True},
    "patterns": {
        "r": 4, "lora_alpha": 6,
        "rank_pattern": {"down_proj": 2, "self_attn.v_proj": 3},
        "alpha_pattern": {"q_proj": 9},
    },
    "some layers": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "up_proj"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama with grouped queries, saved by transformers."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(VARIANTS))
def adapted(request, base, tmp_path_factory):
    """A folder that peft has saved, and the logits [T, V] of its model."""
    torch.manual_seed(5)
    fields = {"target_modules": "all-linear"} | VARIANTS[request.param]
    config = peft.LoraConfig(init_lora_weights=False, lora_dropout=0.1, **fields)
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, config)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    model = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), folder
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].double().numpy()
    return folder, logits


def logits_of(base, folder, device):
    """Logits [V] after IDS with the adapter, number 2, and without one, number 0."""
    backend = make_backend(device)
    config = EngineConfig(
        backend=backend.device, dtype="float32", context=32, max_batch=2,
        max_adapters=3, max_adapter_rank=8, sampling="greedy",
    )  # fmt: skip
    language = open_model(base)
    runner = start_runner(language, backend, config)
    digest = check_adapter(language, folder, 8)
    runner.load_adapter(AdapterSource(2, str(folder), digest))
    limits, found = runner.limits, {}
    for step, (slot, adapter) in enumerate([(1, 2), (2, 0)], start=1):
        blocks = [step]
        frame = admit_frame(
            slot, [blocks], groups=1, max_blocks_per_seq=limits.max_blocks_per_seq,
            adapter=adapter,
        )  # fmt: skip
        runner.submit(frame)
        frame = one_step(limits, [(slot, IDS)], step=step, decoding=0)
        found[adapter] = widen(runner.logits(frame))[0].astype(np.float64)
    runner.close()
    return found


@pytest.mark.parametrize("device", ["reference", "cpu", "cpu on torch", "tpu"])
def test_logits_equal_those_of_peft(base, adapted, device, monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
    if device == "cpu on torch":
        monkeypatch.setenv("INL_CPU", "torch")
    folder, logits = adapted
    found = logits_of(base, folder, device.partition(" ")[0])
    error = np.abs(found[2] - logits[-1]).max() / np.abs(logits).max()
    assert error < 1e-4
    assert np.abs(found[0] - found[2]).max() > 0.01 * np.abs(logits).max()


def test_a_fused_module_gives_each_of_its_parts_its_rows(tmp_path):
    """Phi-3 stores q, k and v as one module, and so does its adapter."""
    torch.manual_seed(3)
    config = transformers.Phi3Config(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=0, original_max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.Phi3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    fused = peft.LoraConfig(
        init_lora_weights=False, r=3, target_modules=["qkv_proj", "gate_up_proj"]
    )
    model = peft.get_peft_model(model, fused).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].double().numpy()
    found = logits_of(tmp_path / "base", tmp_path / "adapter", "reference")
    assert np.abs(found[2] - logits[-1]).max() < 1e-4 * np.abs(logits).max()
