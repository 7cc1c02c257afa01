"""Real GGUF files with k-quants, against transformers over the gguf package.

Set ``INL_MODELS`` to a folder that holds them.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.values import Bucket
from inl.weights.checkpoint import open_checkpoint
from inl.weights.quant import dequantize

CODER = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
PROMPTS = [
    "Write a Python function that reverses a string.",
    "What does `git rebase` do? Answer in one sentence.",
    "SELECT name FROM users WHERE",
]
TOKENS = 48


def model_file(name):
    folder = os.environ.get("INL_MODELS")
    if not folder:
        pytest.skip(f"INL_MODELS is not set to a folder with {name}")
    path = Path(folder) / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


@pytest.mark.parametrize("name", [CODER, GEMMA])
def test_tensors_are_those_of_the_reference_package(name):
    path = model_file(name)
    checkpoint = open_checkpoint(path)
    stored = {stored: name for name, stored in checkpoint._stored.items()}
    kinds = set()
    for one in gguf.GGUFReader(path).tensors:
        expected = gguf.dequantize(one.data, one.tensor_type)
        found = dequantize(checkpoint.tensor(stored[one.name]), one.name)
        if name == GEMMA and one.name.endswith("norm.weight"):
            assert np.array_equal(found, expected - np.float32(1))
        else:
            bits = found.view(np.uint32), expected.view(np.uint32)
            assert np.array_equal(*bits), one.name
        kinds.add(one.tensor_type.name)
    assert {"Q4_K", "Q6_K", "Q5_0", "Q8_0"} <= kinds
    checkpoint.close()


def outside_model(path):
    """transformers' Qwen2 with the weights that the gguf package decodes."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    reader = gguf.GGUFReader(path)

    def field(key):
        return reader.fields[f"qwen2.{key}"].contents()

    config = transformers.Qwen2Config(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        max_position_embeddings=field("context_length"),
        tie_word_embeddings=False,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, field("block_count"))
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    raw = {one.name: one for one in reader.tensors}
    state = {}
    for name in model.state_dict():
        one = raw[names.get_name(name, (".weight", ".bias"))]
        state[name] = torch.tensor(gguf.dequantize(one.data, one.tensor_type))
    model.load_state_dict(state, assign=True, strict=True)
    # Frequencies are no weights, so they are still on the device without memory.
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    return model.eval()


@pytest.fixture(scope="module")
def coder():
    config = EngineConfig(backend="cpu", dtype="float32", max_batch=1, context=256)
    with InferenceEngine.from_pretrained(model_file(CODER), config) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(coder):
    chats = [coder.chat_ids(prompt) for prompt in PROMPTS[:2]]
    return [*chats, coder.tokenizer.encode(PROMPTS[2])]


@pytest.fixture(scope="module")
def oracle(prompts):
    """Logits after each prompt, and what follows it greedily."""
    torch = pytest.importorskip("torch")
    model, found = outside_model(model_file(CODER)), []
    for ids in prompts:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].numpy()
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=[151645, 151643],
                pad_token_id=151643,
            )
        found.append((logits, out[0, len(ids) :].tolist()))
    del model
    gc.collect()
    return found


def first_logits(runner, ids):
    limits = runner.limits
    table = [list(range(1, 1 - (-len(ids) // limits.block_size)))]
    runner.submit(admit_frame(1, table, groups=limits.groups, width=limits.width))
    message = step_frame(
        Bucket(len(ids), 1), [Row(1, ids)], step=0, groups=limits.groups,
        block_size=limits.block_size, decode_rows=0,
    )  # fmt: skip
    return runner.logits(message).data[0]


def test_logits_are_transformers_to_a_thousandth(coder, prompts, oracle, capsys):
    for ids, (expected, _) in zip(prompts, oracle, strict=True):
        found = first_logits(coder.runner, ids)
        worst = np.abs(found - expected).max()
        with capsys.disabled():
            print(f"\n{len(ids)} tokens: logits differ by {worst:.2e} at most")
        assert worst < 1e-3
        assert np.argmax(found) == np.argmax(expected)


def test_greedy_tokens_are_transformers(coder, prompts, oracle, capsys):
    for ids, (_, expected) in zip(prompts, oracle, strict=True):
        found = coder.generate(ids, max_tokens=TOKENS)
        with capsys.disabled():
            print(f"\n{found.text!r}")
        assert list(found.token_ids) == expected
