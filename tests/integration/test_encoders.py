"""Encoders against transformers: tiny models with random weights, on each backend."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from inl.config import EngineConfig
from inl.device import Device
from inl.engine.embedder import PooledRequest
from inl.engine.inference_engine import InferenceEngine
from inl.errors import (
    CheckpointError,
    InlError,
    OutOfMemory,
    RequestError,
    RunnerError,
)
from inl.executor.encoder_executor import load_encoder
from inl.executor.model_loader import open_model
from inl.runners.encoder_runner import EncoderRunner
from inl.spec.encoder import TokenSequence

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
transformers = pytest.importorskip("transformers")

BOUND = 1e-4
VOCAB = 90
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 80, "max_position_embeddings": 300,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
FAMILIES = {
    "Bert": {},
    "Roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "XLMRoberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "MPNet": {"pad_token_id": 1},
    "ModernBert": {
        "pad_token_id": 0,
        "local_attention": 12,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "cls_token_id": 2,
        "sep_token_id": 1,
    },
}
LENGTHS = (3, 17, 1, 140, 8, 40)
POOLINGS = ("cls_token", "mean_tokens", "lasttoken")


def saved(family, path, head="Model", **changes):
    """Save a random model; returns it and sequences of ids."""
    config = getattr(transformers, f"{family}Config")(
        **SIZES | FAMILIES[family] | changes
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{head}")(config).eval()
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=source)
            if name.endswith("bias") or "attention_bias" in name:
                weight.copy_(values)
            elif weight.ndim == 1:
                weight.copy_(1 + 0.3 * values)
            elif "embeddings" in name:
                weight.copy_(values)
            else:
                weight.copy_(2.5 * values / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return model, [
        torch.randint(3, VOCAB, (length,), generator=source).tolist()
        for length in LENGTHS
    ]


def hidden(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].double().numpy()


def modules(path, pooling, *, unit):
    """Write the files of sentence-transformers."""
    parts = ["Transformer", "Pooling", *["Normalize"] * unit]
    listed = [
        {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "",
         "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(parts)
    ]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(listed))
    folder = path / "1_Pooling"
    folder.mkdir(exist_ok=True)
    flags = {f"pooling_mode_{name}": name == pooling for name in POOLINGS}
    (folder / "config.json").write_text(json.dumps(flags))


def pooled(states, pooling):
    if pooling == "mean_tokens":
        return states.mean(0)
    return states[0 if pooling == "cls_token" else -1]


def engine_on(name, path, monkeypatch, **options):
    """An engine on a backend; those without a name of a device are put behind it."""
    config = EngineConfig(dtype="float32", token_budget=300, **options)
    if name in ("reference", "cpu"):
        return InferenceEngine(open_model(path), config=replace(config, backend=name))
    if name == "jax":
        pytest.importorskip("jax")
        monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
        backend = pytest.importorskip("inl_tpu.backend").TpuBackend(Device("tpu:0"))
    else:
        module = importlib.import_module("inl_cpu.torch_backend")
        backend = module.TorchCpuBackend(Device("cpu:0"))
    language = open_model(path)
    runner = EncoderRunner(load_encoder(language, backend, config))
    return InferenceEngine(language, config=config, runner=runner)


def worst(found, expected):
    """Largest difference of a row, relative to its largest number."""
    error = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
    return float(error.max())


BACKENDS = ["reference", "cpu", "torch", "jax"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family, backend, tmp_path, monkeypatch):
    model, texts = saved(family, tmp_path)
    rows = [hidden(model, ids).mean(0) for ids in texts]
    expected = np.stack([row / np.linalg.norm(row) for row in rows])
    with closing(engine_on(backend, tmp_path, monkeypatch)) as engine:
        found = engine.embed(texts)
        assert found.shape == (len(LENGTHS), 48)
        assert worst(found, expected) < BOUND
        # Alone and beside others a sequence has the same result.
        for index in (0, 3):
            assert worst(engine.embed(texts[index]), expected[index]) < BOUND
        # A sequence does see its own order, and no other sequence.
        assert worst(engine.embed([texts[1][::-1]]), expected[1:2]) > 10 * BOUND


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_modules_of_sentence_transformers(pooling, unit, tmp_path, monkeypatch):
    model, texts = saved("Bert", tmp_path)
    modules(tmp_path, pooling, unit=unit)
    expected = np.stack([pooled(hidden(model, ids), pooling) for ids in texts])
    if unit:
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        assert worst(engine.embed(texts), expected) < BOUND


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_that_classifies(family, backend, tmp_path, monkeypatch):
    model, texts = saved(family, tmp_path, "ForSequenceClassification", num_labels=5)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].numpy() for ids in texts]
    weights = np.exp(np.stack(logits).astype(np.float64))
    expected = weights / weights.sum(-1, keepdims=True)
    with closing(engine_on(backend, tmp_path, monkeypatch)) as engine:
        found = engine.classify(texts)
        assert worst(np.stack([each.scores for each in found]), expected) < BOUND
        assert [each.index for each in found] == expected.argmax(-1).tolist()
        assert found[0].label == engine.labels[found[0].index]
        assert engine.labels == tuple(f"LABEL_{number}" for number in range(5))
        with pytest.raises(RequestError, match="classifies; use classify"):
            engine.embed(texts)


def test_checkpoints_of_a_masked_model_with_a_prefix(tmp_path, monkeypatch):
    model, texts = saved("Bert", tmp_path, "ForMaskedLM")
    rows = np.stack([hidden(model.bert, ids).mean(0) for ids in texts])
    rows /= np.linalg.norm(rows, axis=-1, keepdims=True)
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        assert worst(engine.embed(texts), rows) < BOUND


def test_modules_that_are_not_known_are_refused(tmp_path):
    saved("Bert", tmp_path)
    modules(tmp_path, "weightedmean", unit=False)
    with pytest.raises(CheckpointError, match="found pooling"):
        open_model(tmp_path)
    listed = [{"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"found a module .*LSTM"):
        open_model(tmp_path)


def test_an_encoder_generates_no_text(tmp_path, monkeypatch):
    saved("Bert", tmp_path)
    with closing(engine_on("reference", tmp_path, monkeypatch)) as engine:
        with pytest.raises(RequestError, match="is an encoder and generates no text"):
            engine.generate([5, 6])
        with pytest.raises(RequestError, match="accepts 1 to 300"):
            engine.embed([[5] * 301])
        assert engine.embed([]).shape == (0, 48)


def test_an_encoder_in_a_worker(tmp_path, monkeypatch):
    _, texts = saved("Bert", tmp_path, "ForSequenceClassification", num_labels=3)
    worker = f"worker:{sys.executable}/reference"
    config = EngineConfig(backend=worker, dtype="float32", token_budget=300)
    with closing(engine_on("reference", tmp_path, monkeypatch)) as engine:
        expected = [each.scores for each in engine.classify(texts)]
    with InferenceEngine(open_model(tmp_path), config=config) as engine:
        assert engine.device.startswith("worker:")
        with ThreadPoolExecutor(3) as threads:
            for found in threads.map(engine.classify, [texts] * 3):
                rows = [each.scores for each in found]
                assert np.abs(np.array(rows) - expected).max() < BOUND
        with pytest.raises(RequestError, match="accepts 0 to 89"):
            engine.classify([[VOCAB]])
        os.kill(engine.runner.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RunnerError, match="worker"):
                engine.classify(texts)


def test_a_lost_worker_of_an_encoder_is_replaced(tmp_path):
    """Calls that wait for it get their results of another one."""
    _, texts = saved("Bert", tmp_path)
    worker = f"worker:{sys.executable}/reference"
    config = EngineConfig(
        backend=worker, dtype="float32", token_budget=300, on_worker_loss="restart"
    )
    with InferenceEngine(open_model(tmp_path), config=config) as engine:
        expected, first = engine.embed(texts), engine.runner.pid
        os.kill(first, signal.SIGKILL)
        with ThreadPoolExecutor(3) as threads:
            for found in threads.map(engine.embed, [texts] * 3):
                assert np.abs(found - expected).max() < BOUND
        assert engine.runner.pid != first
        assert engine.failure is None
        # A call that fails in the worker leaves it as it was.
        runner, lengths = engine.runner, engine.runner.limits.token_budget + 1
        with pytest.raises(InlError):
            engine.core.encode([TokenSequence([VOCAB + 999] * lengths)])
        assert np.abs(engine.embed(texts) - expected).max() < BOUND
        assert engine.runner is runner


def test_an_encoder_runs_on_one_device(tmp_path):
    saved("Bert", tmp_path)
    config = EngineConfig(tensor_parallel=2)
    with pytest.raises(RequestError, match="accepted: one device of this process or"):
        InferenceEngine(open_model(tmp_path), config=config)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
         *(f"w{n}" for n in range(VOCAB - 5))]  # fmt: skip
QUERY = "w3 w9 w40"
DOCUMENTS = ["w7 w3", "w9 w40 w3 w9 w80 w11", "w1", "w3 w9 w40"]


def tokenizer(path):
    """Save a tokenizer of words, with the pairs of BERT."""
    (path / "vocab.txt").write_text("\n".join(WORDS))
    made = transformers.BertTokenizerFast(str(path / "vocab.txt"))
    made.save_pretrained(path)
    return made


def test_a_cross_encoder_scores_and_ranks_pairs(tmp_path, monkeypatch):
    model, _ = saved("Bert", tmp_path, "ForSequenceClassification", num_labels=1)
    words = tokenizer(tmp_path)
    given = words([QUERY] * 4, DOCUMENTS, padding=True, return_tensors="pt")
    assert given["token_type_ids"].max() == 1
    with torch.no_grad():
        logits = model(**given).logits[:, 0].double().numpy()
    expected = 1 / (1 + np.exp(-logits))
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        found = engine.score([QUERY] * 4, DOCUMENTS)
        assert np.abs(found - expected).max() < BOUND * np.abs(expected).max()
        ranks = engine.rank(QUERY, DOCUMENTS, top=3)
        assert [each.index for each in ranks] == np.argsort(-expected)[:3].tolist()
        assert np.allclose([each.score for each in ranks], np.sort(-expected)[:3] * -1,
                           atol=1e-5)  # fmt: skip
        assert engine.rank(QUERY, []) == []
        with pytest.raises(RequestError, match="found 1 first and 2 second texts"):
            engine.score([QUERY], DOCUMENTS[:2])
        with pytest.raises(RequestError, match="top: found 0"):
            engine.rank(QUERY, DOCUMENTS, top=0)


def test_the_activation_that_a_cross_encoder_names(tmp_path, monkeypatch):
    model, texts = saved("Bert", tmp_path, "ForSequenceClassification", num_labels=1)
    with torch.no_grad():
        logit = float(model(torch.tensor([texts[0]])).logits)
    fields = json.loads((tmp_path / "config.json").read_text())
    name = "sbert_ce_default_activation_function"
    for value, expected in (
        ("torch.nn.modules.linear.Identity", logit),
        ("torch.nn.modules.activation.Sigmoid", 1 / (1 + np.exp(-logit))),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | {name: value}))
        with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
            (found,) = engine.classify([texts[0]])
            assert abs(found.scores[0] - expected) < BOUND * abs(expected)
    (tmp_path / "config.json").write_text(json.dumps(fields | {name: "torch.nn.Tanh"}))
    with pytest.raises(CheckpointError, match="accepted: Identity, Sigmoid"):
        open_model(tmp_path)


def test_embeddings_rank_and_have_prompts_and_dimensions(tmp_path, monkeypatch):
    model, _ = saved("Bert", tmp_path)
    words = tokenizer(tmp_path)
    modules(tmp_path, "mean_tokens", unit=True)
    prompts = {"prompts": {"query": "w50 w51 ", "document": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))

    def vector(text, width=48):
        row = hidden(model, words(text)["input_ids"]).mean(0)[:width]
        return row / np.linalg.norm(row)

    rows = np.stack([vector(text) for text in DOCUMENTS])
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        assert worst(engine.embed(DOCUMENTS), rows) < BOUND
        short = np.stack([vector(text, 16) for text in DOCUMENTS])
        assert worst(engine.embed(DOCUMENTS, dimensions=16), short) < BOUND
        query = vector("w50 w51 " + QUERY)
        found = engine.embed(QUERY, prompt_name="query")
        assert worst(found[0], query) < BOUND
        scores = rows @ query
        ranks = engine.rank(QUERY, DOCUMENTS)
        assert [each.index for each in ranks] == np.argsort(-scores).tolist()
        assert np.allclose(engine.score([QUERY] * 4, DOCUMENTS), scores, atol=1e-5)
        with pytest.raises(RequestError, match="accepted: 'query', 'document'"):
            engine.embed(QUERY, prompt_name="passage")
        with pytest.raises(RequestError, match="dimensions: found 49, accepts 1 to 48"):
            engine.embed(QUERY, dimensions=49)
        with pytest.raises(RequestError, match="has no head that classifies"):
            engine.classify(DOCUMENTS)


def test_concurrent_calls_share_programs(tmp_path, monkeypatch):
    model, texts = saved("Bert", tmp_path)
    rows = [hidden(model, ids).mean(0) for ids in texts]
    expected = np.stack([row / np.linalg.norm(row) for row in rows])
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        runner, sizes, running = engine.runner, [], threading.Event()
        encode, ready = runner.encode, threading.Event()

        def slow(sequences):
            sizes.append(len(sequences))
            running.set()
            if len(sizes) == 1:
                assert ready.wait(300)
            return encode(sequences)

        monkeypatch.setattr(runner, "encode", slow)
        with ThreadPoolExecutor(6) as threads:
            first = threads.submit(engine.embed, [texts[0]])
            assert running.wait(300)
            others = [threads.submit(engine.embed, [ids]) for ids in texts[1:]]
            queue = engine._sequences._waiting
            while len(queue) < 5:
                time.sleep(0.001)
            ready.set()
            found = [call.result()[0] for call in (first, *others)]
        assert sizes == [1, 5]
        (load,) = engine.encoder_load.values()
        assert (load.programs, load.inputs, load.waiting()) == (2, 6, 0)
        assert load.seconds > 0
        assert load.device == engine.device
        assert worst(np.stack(found), expected) < BOUND


def test_an_error_reaches_all_that_share_a_program(tmp_path, monkeypatch):
    _, texts = saved("Bert", tmp_path)
    with closing(engine_on("cpu", tmp_path, monkeypatch)) as engine:
        right = engine.embed(texts)

        def fail(_sequences):
            raise OutOfMemory("no room")

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "encode", fail)
            with pytest.raises(OutOfMemory, match="no room"):
                engine.embed(texts)
        assert np.array_equal(engine.embed(texts), right)


def test_a_decoder_pools_its_last_token(tmp_path):
    families = importlib.import_module("families")
    one = families.make("qwen3", tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path)
    states = hidden(model.eval(), one.ids)
    modules(tmp_path, "lasttoken", unit=True)
    config = EngineConfig(backend="cpu", dtype="float32", context=64)
    with InferenceEngine(open_model(tmp_path), config=config) as engine:
        row = states[-1, :20] / np.linalg.norm(states[-1, :20])
        assert worst(engine.embed(one.ids, dimensions=20)[0], row) < BOUND
        (best, *_) = engine.embed([one.ids, one.ids[:9]])
        assert worst(best, states[-1] / np.linalg.norm(states[-1])) < BOUND


PLACES = {
    "reference": {"backend": "reference"},
    "the CPU": {"backend": "cpu"},
    "a worker": {"backend": f"worker:{sys.executable}/cpu"},
    "ranks": {"backend": f"worker:{sys.executable}/cpu", "placement": "tensor=2"},
    "stages": {"backend": f"worker:{sys.executable}/cpu", "placement": "pipeline=2"},
    "rows": {"backend": f"worker:{sys.executable}/cpu", "placement": "data=2"},
}

MOSTLY_FULL = "stages", "rows", "a worker"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A decoder's folder, sequences of ids and their hidden states."""
    folder = tmp_path_factory.mktemp("decoder")
    one = importlib.import_module("families").make("qwen3", folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    texts = [[*one.ids, *one.ids[:20]], one.ids[:1], one.ids, one.ids[:7]]
    return folder, texts, [hidden(model, ids) for ids in texts]


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(each, marks=[pytest.mark.full] if each in MOSTLY_FULL else [])
        for each in PLACES
    ],
)
def test_a_decoder_pools_as_its_files_say(decoder, place, monkeypatch):
    """Also in chunks, of which each step returns the mean of its own."""
    folder, texts, states = decoder
    options = {"dtype": "float32", "context": 64, "token_budget": 16}
    config = EngineConfig(**options | PLACES[place])
    kinds = ["mean_tokens"]
    if place in ("reference", "the CPU"):
        kinds += ["cls_token", "lasttoken"]
    for kind in kinds:
        modules(folder, kind, unit=kind == "cls_token")
        expected = np.stack([pooled(each, kind) for each in states])
        if kind == "cls_token":
            expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
        with InferenceEngine(open_model(folder), config=config) as engine:
            assert worst(engine.embed(texts), expected) < BOUND, kind
            # Nothing of a mean is left out that the prefix cache has.
            assert worst(engine.embed(texts), expected) < BOUND, kind
            monkeypatch.setattr(PooledRequest, "keep", last_chunk)
            error = worst(engine.embed(texts), expected)
            assert (error > 10 * BOUND) == (kind == "mean_tokens")
            monkeypatch.undo()


def last_chunk(request, _start, stop, row):
    """A fault: what steps before the last return is lost."""
    if stop == len(request.tokens):
        request.hidden = row


TWO_WAY = {
    "qwen2": {"is_causal": False},
    "mistral": {"is_causal": False, "sliding_window": 6},
    "gemma3": {"use_bidirectional_attention": True, "sliding_window": 12},
}


@pytest.mark.parametrize("family", TWO_WAY)
def test_a_decoder_that_attends_in_both_directions(family, tmp_path, monkeypatch):
    """As EmbeddingGemma: a base model, its mean, two products and length 1."""
    families = importlib.import_module("families")
    one = families.make(family, tmp_path / "whole", **TWO_WAY[family])
    model = transformers.AutoModel.from_pretrained(tmp_path / "whole").eval()
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    texts = [one.ids, one.ids[:1], one.ids[5:18]]
    layers = dense(folder, [(48, model.config.hidden_size), (20, 48)])
    states = torch.tensor(np.stack([hidden(model, ids).mean(0) for ids in texts]))
    for layer in layers:
        states = layer(states)
    expected = torch.nn.functional.normalize(states, dim=-1).detach().numpy()
    for backend in BACKENDS if family == "gemma3" else BACKENDS[:2]:
        with closing(engine_on(backend, folder, monkeypatch)) as engine:
            found = engine.embed(texts)
            assert worst(found, expected) < BOUND, backend
            # Causal attention has other states of all but the last token.
            assert worst(engine.embed([texts[0][::-1]]), expected[:1]) > 10 * BOUND
            with pytest.raises(RequestError, match="dimensions: found 21, accepts"):
                engine.embed(texts, dimensions=21)
            with pytest.raises(RequestError, match="generates no text"):
                engine.generate(texts[0])
    config, right = (
        EngineConfig(backend="reference", dtype="float32"),
        open_model(folder),
    )
    if family != "qwen2":  # a fault: windows of another length
        halved = not right.config.halved
        language = replace(right, config=replace(right.config, halved=halved))
    else:  # a fault: a causal mask
        fields = json.loads((folder / "config.json").read_text())
        causal = fields | {"is_causal": True, "tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(causal))
        language = open_model(folder)
    with InferenceEngine(language, config=config) as engine:
        assert worst(engine.embed(texts), expected) > 10 * BOUND


def dense(folder, shapes):
    """Write the modules of a mean, products and length 1; returns the products."""
    modules(folder, "mean_tokens", unit=True)
    listed, made = json.loads((folder / "modules.json").read_text()), []
    unit = listed.pop()
    for at, (rows, columns) in enumerate(shapes, start=2):
        layer = torch.nn.Linear(columns, rows, bias=at == 2).double()
        name, kind = f"{at}_Dense", "Tanh" if at == 2 else "Identity"
        parts = [layer, torch.nn.Tanh()] if at == 2 else [layer]
        made.append(torch.nn.Sequential(*parts))
        (folder / name).mkdir()
        fields = {
            "in_features": columns, "out_features": rows, "bias": at == 2,
            "activation_function": f"torch.nn.modules.activation.{kind}",
        }  # fmt: skip
        (folder / name / "config.json").write_text(json.dumps(fields))
        weights = {
            f"linear.{key}": each.detach().float().contiguous()
            for key, each in layer.state_dict().items()
        }
        save_file(weights, folder / name / "model.safetensors")
        listed.append({
            "idx": at, "name": str(at), "path": name,
            "type": "sentence_transformers.models.Dense",
        })  # fmt: skip
    (folder / "modules.json").write_text(json.dumps([*listed, unit]))
    return made
