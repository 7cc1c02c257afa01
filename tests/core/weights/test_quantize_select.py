"""Quantization while loading: which matrices, the numbers, the errors, refusals."""

from __future__ import annotations

import json
import logging
import sys
from typing import final

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from inl import EngineConfig, InferenceEngine
from inl.backend.base import PackedKernels
from inl.backend.reference import ReferenceBackend, Rendezvous, ThreadCollectives
from inl.checkpoints.blocks.dtypes import convert
from inl.device import Device
from inl.dtypes import HostArray, cast, widen
from inl.errors import CheckpointError, RequestError
from inl.executor.model_loader import LanguageModel, open_model
from inl.models import mixtral
from inl.models.llama import MODEL
from inl.ops.linear import Linear
from inl.plugin import make_backend
from inl.protocol.runner import Limits
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import start_runner
from inl.spec.kernel import Kernel
from inl.spec.tree import leaves
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama
from inl.weights.quantize.report import KINDS
from lora_files import LoraFiles
from quantized_blocks import decoded
from waiting import until

LIMITS = Limits(3, (9,), 16, 4, 256)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
LOGGED = "int4: 14 matrices quantized"
ENDS = ("embed_tokens.weight", "norm.weight", "layernorm.weight", "lm_head.weight")


def made(**given):
    return tiny_llama(np.random.default_rng(3), hidden=64, heads=4, kv_heads=2,
                      head_dim=16, **given)  # fmt: skip


def language_of(config, tensors, model=MODEL):
    files = MemoryCheckpoint(config, tensors)
    return LanguageModel(model, model.config(config), files)


def runner_of(language, kind, dtype="float64"):
    config = EngineConfig(backend="reference", dtype=dtype, quantize=kind)
    return start_runner(language, make_backend("reference"), config, limits=LIMITS)


def plainly_decoded(language, tensors):
    """The tensors in float64, quantized ones by the arithmetic of their format."""
    found = {}
    for name in tensors:
        array = language.checkpoint.tensor(name)
        blocks = array.dtype in KINDS.values()
        found[name] = decoded(array) if blocks else tensors[name].astype(np.float64)
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_decoded_weights(kind, tied):
    config, tensors = made(tied=tied, bias=True)
    language = language_of(config, tensors)
    weights = plainly_decoded(language.quantized(kind), tensors)
    found = prompt_logits(runner_of(language, kind), IDS)
    want = plain_logits(config, weights, IDS)[-1]
    scale = np.abs(want).max()
    assert np.abs(found - want).max() < 1e-5 * scale
    exact = plain_logits(config, tensors, IDS)[-1]
    assert np.abs(exact - want).max() > 1e-4 * scale  # so that the check can fail


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_layers_are_quantized_and_nothing_else(kind):
    config, tensors = made()
    language = language_of(config, tensors).quantized(kind)
    for name, array in tensors.items():
        dtype, shape = language.checkpoint.spec(name)
        plain = name.endswith(ENDS)
        assert (dtype, shape) == ("float32" if plain else KINDS[kind], array.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_errors_and_bytes_are_measured(kind, dtype):
    config, tensors = made()
    stored = {name: cast(array, dtype) for name, array in tensors.items()}
    language = language_of(config, stored).quantized(kind)
    found = language.quantization
    assert found.dtype == kind
    change = weight = 0.0
    errors = {}
    for layer in found.layers:
        before = widen(stored[layer.name]).astype(np.float64)
        array = language.checkpoint.tensor(layer.name)
        after = decoded(array)
        errors[layer.name] = np.linalg.norm(after - before) / np.linalg.norm(before)
        assert layer.error == pytest.approx(errors[layer.name], rel=1e-4)
        assert layer.bytes_before == stored[layer.name].data.nbytes
        assert layer.bytes_after == array.data.nbytes < layer.bytes_before
        change += np.square(after - before).sum()
        weight += np.square(before).sum()
    assert len(errors) == 14
    assert found.rms_error == pytest.approx((change / weight) ** 0.5, rel=1e-4)
    assert found.error == max(layer.error for layer in found.layers)
    low, high = {"int8": (3e-3, 9e-3), "fp8": (2e-2, 4e-2), "int4": (4e-2, 0.12)}[kind]
    assert low < found.rms_error < high
    worst = max(errors, key=errors.get)
    assert f"{found.rms_error:.3%}" in found.describe()
    assert found.describe().endswith(f"in {worst}")


def test_the_error_is_logged_once_loaded(caplog):
    language = language_of(*made())
    with caplog.at_level(logging.INFO, "inl"):
        runner_of(language, "int8")
    (line,) = [one for one in caplog.messages if "relative RMS error" in one]
    assert line.startswith("memory: int8: 14 matrices quantized, ")
    assert any("are decoded to the compute dtype" in one for one in caplog.messages)


def test_rows_of_no_whole_blocks_stay_and_are_named(caplog):
    config, tensors = made(inner=80)
    language = language_of(config, tensors)
    with caplog.at_level(logging.WARNING, "inl"):
        runner = runner_of(language, "int4")
    (line,) = [one for one in caplog.messages if "multiple of 32" in one]
    assert "2 matrices stay as stored, because their rows of 80" in line
    assert "model.layers.0.mlp.down_proj.weight, model.layers.1.mlp" in line
    quantized = language.quantized("int4")
    down = quantized.checkpoint.spec("model.layers.0.mlp.down_proj.weight")
    assert down == ("float32", (64, 80))
    weights = plainly_decoded(quantized, tensors)
    want = plain_logits(config, weights, IDS)[-1]
    found = prompt_logits(runner, IDS)
    assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()


def mixture(fused=False):
    config, tensors = made(layers=1)
    rng = np.random.default_rng(9)
    at = "model.layers.0."
    for name in ("gate", "up", "down"):
        del tensors[f"{at}mlp.{name}_proj.weight"]
    sizes = {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}
    parts = {
        name: (1.4 * rng.standard_normal((4, *shape)) / shape[1] ** 0.5)
        for name, shape in sizes.items()
    }
    tensors[f"{at}block_sparse_moe.gate.weight"] = rng.standard_normal((4, 64))
    stem = f"{at}block_sparse_moe.experts"
    if fused:
        both = np.concatenate([parts["w1"], parts["w3"]], 1)
        tensors[f"{at}mlp.experts.gate_up_proj"] = both
        tensors[f"{at}mlp.experts.down_proj"] = parts["w2"]
        tensors[f"{at}mlp.gate.weight"] = tensors.pop(
            f"{at}block_sparse_moe.gate.weight"
        )
    else:
        for name, each in parts.items():
            for number, matrix in enumerate(each):
                tensors[f"{stem}.{number}.{name}.weight"] = matrix
    config |= {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    return config, {name: x.astype(np.float32) for name, x in tensors.items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_quantized_and_routers_are_not(kind, fused):
    """Logits equal those of a checkpoint of the decoded weights."""
    config, tensors = mixture(fused)
    language = language_of(config, tensors, mixtral.MODEL)
    quantized = language.quantized(kind)
    names = {layer.name for layer in quantized.quantization.layers}
    assert {name for name in tensors if "experts" in name} <= names
    assert not {name for name in names if "gate.weight" in name}
    weights = plainly_decoded(quantized, tensors)
    plain = language_of(config, weights, mixtral.MODEL)
    found, want = (prompt_logits(runner_of(*each), IDS)
                   for each in ((language, kind), (plain, None)))  # fmt: skip
    assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()
    exact = prompt_logits(runner_of(language, None), IDS)
    assert np.abs(exact - want).max() > 1e-4 * np.abs(want).max()


def test_kinds_and_models_that_are_refused():
    config, tensors = made()
    language = language_of(config, tensors)
    with pytest.raises(RequestError, match="quantize: found 'int3', accepted: None, f"):
        EngineConfig(quantize="int3")
    with pytest.raises(RequestError, match="quantize: found 'int3', accepted: fp8, "):
        language.quantized("int3")
    int8 = language.quantized("int8")
    assert int8.quantized("int8") is int8
    with pytest.raises(RequestError, match="is quantized already: q8_0; acc"):
        int8.quantized("int4")


def test_a_quantized_file_is_refused_by_its_format():
    config, tensors = made()
    blocks = gguf.quantize(tensors["model.layers.1.mlp.up_proj.weight"],
                           gguf.GGMLQuantizationType.Q5_0)  # fmt: skip
    packed = HostArray(blocks, "q5_0", (96, 64))
    mixed = tensors | {"model.layers.1.mlp.up_proj.weight": packed}
    with pytest.raises(RequestError, match=r"memory is quantized already: q5_0; acc"):
        language_of(config, mixed).quantized("int8")
    fp8 = config | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(RequestError, match=r"already: quantization_config: fp8"):
        language_of(fp8, tensors).quantized("int8")


def test_nan_is_refused():
    config, tensors = made()
    tensors["model.layers.0.mlp.up_proj.weight"][5, 40] = np.nan
    with pytest.raises(CheckpointError, match=r"up_proj.weight: found nan at \[5, 32"):
        runner_of(language_of(config, tensors), "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    config, tensors = made()
    (root / "config.json").write_text(json.dumps(config))
    save_file(tensors, root / "model.safetensors")
    LoraFiles(tensors, seed=1).write(root / "lora")
    return root


def engine_of(folder, **given):
    given = {"backend": "reference", "context": 64, "sampling": "greedy"} | given
    return InferenceEngine(open_model(folder), config=EngineConfig(**given))


def answer(engine, **options):
    return engine.generate(IDS, max_tokens=8, **options).token_ids


def test_workers_quantize_as_this_process_does(folder, caplog):
    with engine_of(folder) as plain, engine_of(folder, quantize="int4") as engine:
        expected = answer(engine)
        assert answer(plain) != expected
    backend = f"worker:{sys.executable}/reference"
    caplog.set_level(logging.INFO, "inl")
    caplog.clear()
    with engine_of(folder, quantize="int4", backend=backend) as engine:
        assert answer(engine) == expected
        until(lambda: [one for one in caplog.messages if LOGGED in one])
    language = open_model(folder).quantized("int4")
    config = EngineConfig(backend=backend, context=64, sampling="greedy")
    with InferenceEngine(language, config=config) as engine:
        assert answer(engine) == expected


def test_adapters_are_added_to_quantized_weights(folder):
    """As to a checkpoint of the decoded weights."""
    options = {"max_adapters": 1, "max_adapter_rank": 4, "dtype": "float64"}
    with engine_of(folder, quantize="int4", **options) as engine:
        engine.load_adapter("one", folder / "lora")
        found = answer(engine, adapter="one")
        base = answer(engine)
    language = open_model(folder)
    names = language.checkpoint.names()
    tensors = {name: language.checkpoint.tensor(name).data for name in names}
    weights = plainly_decoded(language.quantized("int4"), tensors)
    plain = language_of(language.checkpoint.config, weights)
    config = EngineConfig(backend="reference", context=64, sampling="greedy", **options)
    with InferenceEngine(plain, config=config) as engine:
        engine.load_adapter("one", folder / "lora")
        assert answer(engine, adapter="one") == found != base


def test_ranks_have_their_parts(folder):
    config = EngineConfig(
        backend="reference", dtype="float32", quantize="int8", context=64,
        sampling="greedy",
    )  # fmt: skip
    rendezvous, language = Rendezvous(2), open_model(folder)

    def make(rank):
        collectives = ThreadCollectives(2, rank, rendezvous)
        backend = ReferenceBackend(
            Device("reference"), dtype="float32", collectives=collectives
        )
        return start_runner(language, backend, config, rank=rank)

    with engine_of(folder, quantize="int8") as engine:
        expected = answer(engine)
    runner = RankRunner(make, 2, abort=rendezvous.abort)
    with InferenceEngine(language, config=config, runner=runner) as engine:
        assert answer(engine) == expected


@final
class Packing(ReferenceBackend):
    """Offers a product with packed weights for models that are quantized."""

    def offers(self, kind):
        if kind is PackedKernels:
            return PackedKernels(self.packed)
        return super().offers(kind)

    def packed(self):
        def pack(group, backend, dtype):
            return Linear(backend.tensor(convert(group["weight"], dtype)), None)

        run = {kernel.op: kernel for kernel in self.kernels()}["linear"].run
        yield Kernel("linear", "packed", run, pack=pack, layout="plain", preference=5)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_kernels_that_save_memory_are_used_on_request(kind):
    language, backend = language_of(*made()), Packing(Device("reference"))
    for asked in (language, language.quantized(kind) if kind else language):
        quantize = kind if asked is language else None
        config = EngineConfig(backend="reference", quantize=quantize)
        runner = start_runner(asked, backend, config, limits=LIMITS)
        plans = leaves(runner.loaded.groups)
        packed = [plan.kernel.name for plan in plans if plan.kernel]
        assert set(packed) == ({"packed"} if kind else set())
