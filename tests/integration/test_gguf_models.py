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
from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import open_checkpoint
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.near_tie import compare

CODER = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
PROMPTS = [
    "Write a Python function that reverses a string.",
    "What does `git rebase` do? Answer in one sentence.",
    "SELECT name FROM users WHERE",
]
COUNTING = ", ".join(str(number) for number in range(1, 150)) + ","
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
    """transformers' model with the weights that the gguf package decodes."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def field(key):
        return reader.fields[f"{architecture}.{key}"].contents()

    kind, changes = OUTSIDE[architecture](field)
    config = getattr(transformers, kind[0])(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        **changes,
    )
    arch = getattr(gguf.MODEL_ARCH, architecture.upper())
    names = gguf.get_tensor_name_map(arch, field("block_count"))
    with torch.device("meta"):
        model = getattr(transformers, kind[1])(config)
    raw = {one.name: one for one in reader.tensors}
    state = {}
    for name in model.state_dict():
        stored = names.get_name(name, (".weight", ".bias"))
        one = raw.get(stored, raw["token_embd.weight"])  # tied heads are not stored
        values = gguf.dequantize(one.data, one.tensor_type)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values - np.float32(1)
        state[name] = torch.tensor(values)
    model.load_state_dict(state, assign=True, strict=True)
    # What is no weight is still on the device without memory.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    embed = model.model.embed_tokens
    if architecture == "gemma3":
        embed.embed_scale = torch.tensor(config.hidden_size**0.5)
    return model.eval()


def qwen2_outside(field):
    rope = {"rope_type": "default", "rope_theta": field("rope.freq_base")}
    changes = {"rope_parameters": rope, "tie_word_embeddings": False}
    return ("Qwen2Config", "Qwen2ForCausalLM"), changes


def gemma3_outside(field):
    """What its files leave out is that of the published config of this size."""
    plain = {"rope_type": "default"}
    changes = {
        "head_dim": field("attention.key_length"),
        "query_pre_attn_scalar": 256,
        "sliding_window": field("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": {**plain, "rope_theta": field("rope.freq_base")},
            "sliding_attention": {**plain, "rope_theta": 10000.0},
        },
    }
    return ("Gemma3TextConfig", "Gemma3ForCausalLM"), changes


OUTSIDE = {"qwen2": qwen2_outside, "gemma3": gemma3_outside}


@pytest.fixture(scope="module", params=[CODER, GEMMA])
def path(request):
    return model_file(request.param)


@pytest.fixture(scope="module")
def engine(path):
    config = EngineConfig(backend="cpu", dtype="float32", max_batch=1, context=1024)
    with InferenceEngine.from_pretrained(path, config) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine, path):
    """Chats where the model has a template; one is longer than Gemma's window."""
    if open_checkpoint(path).chat_template is None:
        plain = ["The capital of France is", "Once upon a time", COUNTING]
        return [engine.tokenizer.encode(prompt) for prompt in plain]
    chats = [engine.chat_ids(prompt) for prompt in PROMPTS[:2]]
    return [*chats, engine.tokenizer.encode(PROMPTS[2])]


@pytest.fixture(scope="module")
def oracle(path, prompts):
    """Logits after each prompt, what follows it greedily, and the gaps of that."""
    torch = pytest.importorskip("torch")
    model, found = outside_model(path), []
    ends = list(open_checkpoint(path).eos_token_ids)
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        text = out.sequences[0, len(ids) :].tolist()
        found.append((logits[0].numpy(), text, gaps))
    del model
    gc.collect()
    return found


def first_logits(runner, ids):
    limits = runner.limits
    blocks = list(range(1, 1 - (-len(ids) // limits.block_size)))
    table = [blocks] * limits.groups
    runner.submit(
        admit_frame(
            1, table, groups=limits.groups, max_blocks_per_seq=limits.max_blocks_per_seq
        )
    )
    message = step_frame(
        Bucket(len(ids), 1), [Row(1, ids)], step=0, groups=limits.groups,
        block_size=limits.block_size, decode_rows=0,
    )  # fmt: skip
    return runner.logits(message).data[0]


def test_logits_are_transformers_to_a_thousandth(engine, prompts, oracle, capsys):
    for ids, (expected, _, _) in zip(prompts, oracle, strict=True):
        found = first_logits(engine.runner, ids)
        worst = np.abs(found - expected).max()
        with capsys.disabled():
            print(f"\n{len(ids)} tokens: logits differ by {worst:.2e} at most")
        assert worst < 1e-3
        assert np.argmax(found) == np.argmax(expected)


def test_greedy_tokens_are_transformers_under_the_gap_rule(
    engine, prompts, oracle, capsys
):
    for ids, (_, expected, gaps) in zip(prompts, oracle, strict=True):
        found = engine.generate(ids, max_tokens=TOKENS)
        same = compare(found.token_ids, expected, gaps)
        with capsys.disabled():
            print(f"\n{found.text!r}: {same.agreed} of {len(expected)} tokens agree")
        assert same.allowed("float32"), same
