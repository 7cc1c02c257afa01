"""Sampling defaults of a model: ``generation_config.json`` and GGUF metadata."""

from __future__ import annotations

import json
import logging

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.gguf.checkpoint import GgufCheckpoint
from inl.checkpoints.sampling import gguf_sampling, sampling_defaults
from inl.errors import CheckpointError
from inl.testing.tiny import tiny_llama

BYTES = tokenizers.Tokenizer(
    tokenizers.models.BPE({chr(at + 33): at for at in range(90)}, [])
)

PROMPT = list(range(2, 9))
ASKED = {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture
def folder(tmp_path):
    config, tensors = tiny_llama(np.random.default_rng(5), vocab=96, kv_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def opened(folder):
    made = []

    def make(fields, **settings):
        (folder / "generation_config.json").write_text(json.dumps(fields))
        settings = {"backend": "reference", "context": 64} | settings
        made.append(InferenceEngine.from_pretrained(folder, EngineConfig(**settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ids(engine, **options):
    return engine.generate(PROMPT, max_tokens=12, seed=4, **options).token_ids


def test_the_file_sets_what_a_request_does_not(opened):
    plain = opened({})
    engine = opened({"do_sample": True, **ASKED})
    assert ids(engine) == ids(plain, **ASKED) != ids(plain)
    assert ids(engine, temperature=None) == ids(engine)
    assert ids(engine, temperature=0, repetition_penalty=1) == ids(plain)
    some = {**ASKED, "top_k": 2}
    assert ids(engine, top_k=2) == ids(plain, **some)


def test_none_does_not_read_it(opened):
    engine = opened(ASKED, generation_config="none")
    assert dict(engine.sampling_defaults) == {}
    assert ids(engine) == ids(opened({}))


def test_every_way_to_submit_has_the_defaults(opened):
    engine = opened({"temperature": 1.3})
    expected = ids(engine)
    handle = engine.submit(PROMPT, max_tokens=12, seed=4)
    while not handle.completed:
        engine.step()
    assert tuple(handle.token_ids) == expected


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.2}, {"temperature": 0.2}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": None, "top_k": None}, {}),
        ({"top_k": -1, "top_p": 0}, {"top_k": 0, "top_p": 1e-6}),
        ({"eos_token_id": 2, "max_new_tokens": 5}, {}),
    ],
)
def test_what_fields_mean(fields, options):
    assert sampling_defaults(fields, "x") == options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", True),
        ("temperature", float("nan")), ("top_k", 1.5), ("top_k", 2**31),
        ("top_p", 2), ("min_p", -0.1), ("repetition_penalty", 0),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_a_way_out(name, value):
    with pytest.raises(CheckpointError) as caught:
        sampling_defaults({name: value}, "folder")
    for word in ("folder", name, "--generation-config none"):
        assert word in str(caught.value)


def test_a_smaller_sampler_has_no_defaults_that_it_cannot_serve(opened, caplog):
    with caplog.at_level(logging.WARNING, "inl"):
        engine = opened(ASKED, sampling="greedy")
    assert ids(engine) == ids(opened({}))
    assert "temperature=1.3" in caplog.text


def test_loading_says_what_is_used(opened, caplog):
    with caplog.at_level(logging.INFO, "inl"):
        opened({"temperature": 0.6})
    assert "temperature=0.6" in caplog.text
    assert "generation_config" in caplog.text


def test_gguf_metadata(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in {"temp": 0.5, "top_p": 0.75, "penalty_repeat": 1.25}.items():
        writer.add_float32(f"general.sampling.{name}", value)
    writer.add_int32("general.sampling.top_k", 40)
    for add, value in {
        writer.add_block_count: 1, writer.add_context_length: 64,
        writer.add_embedding_length: 32, writer.add_feed_forward_length: 32,
        writer.add_head_count: 2, writer.add_head_count_kv: 2,
        writer.add_layer_norm_rms_eps: 1e-5, writer.add_vocab_size: 4,
    }.items():  # fmt: skip
        add(value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufCheckpoint(tmp_path / "m.gguf").generation_config
    assert sampling_defaults(found, "x") == {
        "temperature": 0.5, "top_k": 40, "top_p": 0.75, "repetition_penalty": 1.25,
    }  # fmt: skip
    assert gguf_sampling({"general.sampling.mirostat": 2}) == {}


def test_max_tokens_ends(engines):
    engine = engines(context=512)
    prompt = [3, 4, 5]
    default = engine.generate(prompt)
    assert (len(default.token_ids), default.finish_reason) == (256, "length")
    whole = engine.generate(prompt, max_tokens=None)
    assert len(whole.token_ids) == 512 - len(prompt)


def test_the_context_bounds_the_default(engines):
    engine = engines(context=64)
    assert len(engine.generate([3, 4, 5]).token_ids) == 61


def test_a_server_serves_the_models_temperature(opened):
    from inl.serve.served_model import ServedModel

    served = ServedModel(opened({"temperature": 0.3, "top_k": 3}), "m")
    assert served.engine.sampling_defaults == {"temperature": 0.3, "top_k": 3}
    served = ServedModel(opened({"top_k": 3}), "m")
    assert served.engine.sampling_defaults == {"temperature": 1.0, "top_k": 3}


def test_the_command_line_says_what_it_uses(folder, capsys):
    from inl.cli.main import main

    fields = {"temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(BYTES.to_str())
    words = ["generate", "ab", "--raw", "--model", str(folder), "--json"]
    words += ["--device", "reference", "--max-tokens", "2"]

    def used(*more):
        assert main([*words, *more]) == 0
        return json.loads(capsys.readouterr().out)["sampling"]

    others = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert used() == {**fields, **others}
    assert used("--top-k", "3")["top_k"] == 3
    plain = {"temperature": 0.0, "top_k": 0, **others}
    assert used("--generation-config", "none") == plain
