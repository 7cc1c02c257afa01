"""Runs models on meshes of 8 virtual devices; prints what they answer as JSON.

Usage: mesh_worker.py CASE..., in a process of its own: JAX makes its devices once.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

os.environ["JAX_PLATFORMS"] = os.environ["INL_TPU_PLATFORM"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

sys.path.append(str(Path(__file__).parents[2] / "support"))

import jax
import jax.numpy as jnp
import numpy as np

import mixture_answers
from inl import EngineConfig, InferenceEngine
from inl.backend.reference import ReferenceBackend
from inl.checkpoints.blocks.encode import encode
from inl.device import Device
from inl.dtypes import HostArray
from inl.errors import InlError
from inl.executor.model_loader import LanguageModel, open_model
from inl.models import gpt_oss, llama, mixtral
from inl.placement.placement import parse_placement
from inl.runners.local_runner import start_runner
from inl.runners.startup import over_mesh, start
from inl.spec.limits import Limits
from inl.spec.message import POOLED
from inl.spec.tree import leaves
from inl.testing.near_tie import compare
from inl.testing.play import admission, one_step
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.testing.traffic import Traffic, play
from inl.weights.sources import stored_tensors
from inl_jax.mesh.backend import MeshBackend
from inl_jax.mesh.validate import validate_weights
from inl_jax.pallas import linear
from inl_tpu.backend import TpuBackend

ORACLE = Path(__file__).parents[2] / "data" / "smollm2-oracle.json"
TOKENS = 10
LIMITS = Limits(4, (41,), 4, 12, 96, sampler="greedy", token_budget=32)
PROMPT = [5, 80, 2, 33, 64, 11, 7, 90, 41]
MIXTRAL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def of(config, tensors):
    files = MemoryCheckpoint(config, tensors)
    return LanguageModel(llama.MODEL, llama.MODEL.config(config), files)


def dense(**sizes):
    return of(*tiny_llama(np.random.default_rng(11), **sizes))


def mixture(kind=None, model=mixtral.MODEL, **fields):
    rng = np.random.default_rng(5)
    hf, shapes = MIXTRAL | fields, {}
    config = model.config(hf)
    for group in leaves(model.weights(config)):
        for param in group.params.values():
            shapes |= stored_tensors(param)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        for name, shape in sorted(shapes.items())
    }
    if kind:
        for name in tensors:
            if "self_attn" in name:
                tensors[name] = quantized(tensors[name], kind)
    return LanguageModel(model, config, MemoryCheckpoint(hf, tensors))


def quantized(values, kind):
    """A matrix in blocks of 32, or in float8."""
    if kind == "float8_e4m3":
        codes = np.asarray(values, jnp.float8_e4m3fn).view(np.uint8)
        return HostArray(codes, kind, values.shape)
    if kind != "q4_0":
        return encode(values, kind)
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 7).astype(np.float16)
    codes = (np.round(blocks / scales.astype(np.float32)).clip(-8, 7) + 8).astype("u1")
    halves = codes[:, :16] | codes[:, 16:] << 4
    data = np.concatenate([scales.view(np.uint8), halves], 1)
    return HostArray(data.reshape(len(values), -1), kind, values.shape)


def stored_as(kind, **sizes):
    """A Llama whose eight parts of each matrix are whole blocks."""
    sizes = {"hidden": 64, "head_dim": 32, "inner": 256, "layers": 1, **sizes}
    config, tensors = tiny_llama(np.random.default_rng(11), **sizes)
    files = {
        name: quantized(data, kind) if "_proj.weight" in name else data
        for name, data in tensors.items()
    }
    return of(config, files)


MODELS = {
    "llama": dense,
    "2-kv-heads": lambda: dense(kv_heads=2),
    "odd-vocabulary": lambda: dense(vocab=95),
    "9-heads": lambda: dense(heads=9, kv_heads=3, hidden=72, inner=96, layers=1),
    "biases": lambda: dense(bias=True, layers=1),
    "moe": mixture,
    "biased-experts": lambda: mixture(
        model=gpt_oss.MODEL, layer_types=["full_attention"] * 2
    ),
}


def runner(language, mesh, kv_dtype="auto", **given):
    backend = over_mesh(TpuBackend(Device("tpu:0")), parse_placement(mesh))
    config = EngineConfig(dtype="float32", kv_dtype=kv_dtype)
    return start_runner(language, backend, config, limits=replace(LIMITS, **given))


def logits(one):
    one.submit(admission(one.limits, 1, range(1, 4)))
    return one.logits(one_step(one.limits, [(1, PROMPT)], step=99, decoding=0)).data


def texts(one, limits):
    source = Traffic(np.random.default_rng(6), limits, sampler="greedy")
    played = play(one, source.frames(24)).items()
    return {str(key): [int(token) for token in text] for key, text in played}


def traffic(model, mesh, steps):
    """Random steps of a mesh and of the float64 reference, and logits of a prompt."""
    language = MODELS[model]()
    vocab = language.config.vocab_size
    many = runner(language, mesh, decode_steps=int(steps), vocab=vocab)
    exact = ReferenceBackend(Device("reference:0"), dtype="float64")
    alone = local_runner(
        exact, language.model, language.checkpoint, many.limits, dtype="float64"
    )
    error = np.abs(logits(many)[0] - logits(alone)[0]).max()
    for each in (many, alone):
        each.reset()
    tensors = validate_weights(many)
    return {
        "mesh": texts(many, many.limits),
        "alone": texts(alone, many.limits),
        "error": float(error),
        "divided": sum("'tensor'" in each.found for each in tensors),
        "tensors": len(tensors),
    }


def pooled(mesh):
    """Largest differences of hidden states: of a mesh to float64, and their size."""
    language = dense(kv_heads=2)
    many = runner(language, mesh)
    exact = ReferenceBackend(Device("reference:0"), dtype="float64")
    alone = local_runner(
        exact, language.model, language.checkpoint, many.limits, dtype="float64"
    )
    states = []
    for each in (many, alone):
        each.submit(admission(each.limits, 1, range(1, 4)))
        parts = [(1, PROMPT)]
        each.submit(one_step(each.limits, parts, step=1, decoding=0, flags=POOLED))
        states.append(each.collect().hidden[0])
    return [float(np.abs(states[0] - states[1]).max()), float(np.abs(states[1]).max())]


def int8_cache(mesh):
    """Largest differences of logits: of a mesh to one device, of int8 to float32."""
    many, one, exact = (
        logits(runner(dense(), place, dtype))
        for place, dtype in ((mesh, "int8"), ("tensor=1", "int8"), ("tensor=1", "auto"))
    )
    return [float(np.abs(x - y).max()) for x, y in ((many, one), (one, exact))]


@contextmanager
def packing(wrong=False):
    """The TPU's products with packed weights, on virtual devices.

    wrong: whether every rank has the part of the first one.
    """
    own, right = TpuBackend.kernels, MeshBackend.packed

    def packed(self, pack):
        return right(self, lambda rank, one: pack(0 if wrong else rank, one))

    def kernels(self):
        return (*own(self), *linear.kernels(interpret=True))

    with (
        patch.object(TpuBackend, "kernels", kernels),
        patch.object(MeshBackend, "packed", packed),
    ):
        yield


def packed(kind, mesh, model="llama"):
    """A mesh with packed weights, one device with them, and a mesh without."""
    sizes = {"kv_heads": 2, "bias": True} if "data" in mesh else {}
    # Packed inputs are padded to 128 on each rank, of a smaller model to many times.
    language = (
        mixture(kind, hidden_size=160) if model == "moe" else stored_as(kind, **sizes)
    )
    with packing():
        runners = {"mesh": runner(language, mesh), "one": runner(language, "tensor=1")}
    runners["plain"] = runner(language, mesh)
    exact = ReferenceBackend(Device("reference:0"), dtype="float64")
    limits = runners["mesh"].limits
    alone = local_runner(
        exact, language.model, language.checkpoint, limits, dtype="float64"
    )
    wanted = logits(alone)[0]
    errors = [np.abs(logits(each)[0] - wanted).max() for each in runners.values()]
    for each in (alone, *runners.values()):
        each.reset()
    return {
        "alone": texts(alone, limits),
        "texts": {name: texts(each, limits) for name, each in runners.items()},
        "error": float(max(errors)),
        "packed": {name: packed_groups(each) for name, each in runners.items()},
        "bytes": {name: layer_bytes(each) for name, each in runners.items()},
        "tensors": len(validate_weights(runners["mesh"])),
    }


def packed_fault(kind, mesh):
    """Error of the logits where every rank has the part of the first one."""
    language = stored_as(kind)
    with packing(wrong=True):
        wrong = runner(language, mesh)
    return float(np.abs(logits(wrong)[0] - logits(runner(language, mesh))[0]).max())


def packed_groups(one):
    return sum(plan.layout == "packed" for plan in leaves(one.loaded.groups))


def layer_bytes(one):
    """Bytes of the layers' weights on the first device."""
    arrays = jax.tree.leaves(one.loaded.weights.layers)
    return sum(array.addressable_shards[0].data.nbytes for array in arrays)


def engine(mesh, speculation, steps):
    """The default model in an engine, more requests than run at once; the oracle's."""
    draft = None if speculation == "none" else speculation
    cases = json.loads(ORACLE.read_text("utf-8"))["cases"][:3]
    config = EngineConfig(
        "tpu:0", mesh=mesh, dtype="float32", max_batch=2, context=96, token_budget=64,
        sampling="greedy", speculation=draft, decode_steps=int(steps),
        max_drafts=3 if draft else None, adaptive_drafts=False,
    )  # fmt: skip
    with InferenceEngine.from_pretrained(config=config) as one:
        prompts = [case["prompt_ids"] for case in cases]
        answers = one.generate(prompts, max_tokens=TOKENS)
    compared = [
        compare(answer.token_ids, case["token_ids"][:TOKENS], case["margins"])
        for answer, case in zip(answers, cases, strict=True)
    ]
    return {
        "mesh": [list(answer.token_ids) for answer in answers],
        "alone": [case["token_ids"][:TOKENS] for case in cases],
        "allowed": [each.allowed("float32") for each in compared],
    }


def answers(mesh):
    """A mixture on a mesh and on the reference: each kind of request."""
    options = {**mixture_answers.OPTIONS, "max_adapters": None}
    found = {}
    with TemporaryDirectory() as folder:
        path = mixture_answers.write(Path(folder) / "model", *mixture_answers.made())
        language = open_model(path)
        for name, placement in (("tpu:0", mesh), ("reference", None)):
            config = EngineConfig(
                name, placement=placement, dtype="float32", adaptive_drafts=False,
                **options,
            )  # fmt: skip
            found[name] = mixture_answers.answers(start(language, config).runner)
    return found


def refusal(model, mesh):
    try:
        runner(MODELS[model](), mesh)
    except InlError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


CASES = {
    "traffic": traffic,
    "pooled": pooled,
    "int8_cache": int8_cache,
    "packed": packed,
    "packed_fault": packed_fault,
    "engine": engine,
    "answers": answers,
    "refusal": refusal,
}


def main(*cases):
    """Run cases such as "traffic llama tensor=8 1"."""
    found = {}
    for case in cases:
        name, *words = case.split(" ")
        found[case] = CASES[name](*words)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
