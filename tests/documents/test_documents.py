"""Every Python block of the documents that INL replaces, with their root changed.

``tests/data/documents`` holds the blocks. A block runs after the earlier ones of its
document, with what it leaves undefined. ``OUTCOMES`` lists those that do not simply
run: JAX refuses some as written, and an absent TPU is refused by a sentence.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import numpy as np
import pytest

from byte_tokens import bytes_as_tokens
from inl.device import Device
from inl.errors import DeviceError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.nn import place
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

DATA = Path(__file__).parents[1] / "data" / "documents"
NO_TPU = (DeviceError, "pip install inl-tpu|no TPU")
OUTCOMES = {
    ("tpu_devices", 3): NO_TPU,
    ("tpu_devices", 4): NO_TPU,
    ("tpu_devices", 5): NO_TPU,
    ("tpu_devices", 6): NO_TPU,
    # Errors of JAX: the block is not valid for it.
    ("tpu_optimized_kernels", 1): (ValueError, "len.axis_names. == 3"),
    ("tpu_optimized_kernels", 5): (ModuleNotFoundError, "jax.checkpoint"),
    ("tpu_optimized_kernels", 6): (TypeError, "log_dir"),
}
"""(document, block) -> the error and its message, without a TPU."""


def blocks(document):
    text = (DATA / f"{document}.txt").read_text("utf-8")
    # The documents write "..." for parameters, which is not Python.
    text = text.replace("(...)", "(*operands)")
    return [part.split("\n", 1)[1] for part in text.split("# %% ")[1:]]


DOCUMENTS = sorted(path.stem for path in DATA.glob("*.txt"))


def data():
    return jnp.arange(12, dtype=jnp.float32).reshape(3, 4)


def common():
    from inl import kernels

    names = {name: getattr(kernels, name) for name in (
        "tpu_kernel", "gpu_kernel", "sparse_kernel", "expert_kernel",
        "KernelError", "DeviceError",
    )}  # fmt: skip
    from inl.kernels.tpu import register_tpu_op

    return {
        **names, "__name__": "documents", "register_tpu_op": register_tpu_op,
        "jax": jax, "jnp": jnp, "torch": torch, "Optional": Optional, "time": time,
        "PartitionSpec": jax.sharding.PartitionSpec,
        "PrecisionConfig": jax.lax.Precision,
        "xla_client": SimpleNamespace(PrecisionConfig=jax.lax.Precision),
        "devices": np.array(jax.devices()[:1]).reshape(1, 1),
        "logger": logging.getLogger("documents"), "data": data(),
    }  # fmt: skip


def supplies(document, number, request):
    """What a block leaves undefined, besides the common names."""
    if document == "tpu_inl":
        made = torch.ones(2, 3)
        if number == 0:
            names = ("x", "v", "mu", "alpha", "beta", "gate")
            return dict.fromkeys(names, 0.5 * made)
        if number == 1:
            model, tokenizer = request.getfixturevalue("tiny_model")
            return {"model": model, "tokenizer": tokenizer}
        return {"model": torch.nn.Sequential(torch.nn.Linear(3, 4))}
    if document == "tpu_optimized_kernels":
        sizes = ("batch", "height", "width", "channels")
        return {
            **dict.fromkeys(sizes, 256), "a": data(), "b": data().T,
            "my_tpu_kernel": kernel_of_the_user(), "expected_shape": (128, 128),
        }  # fmt: skip
    if document == "tpu_kernels" and number == 1:
        return {"y": jnp.ones((1024, 1024))}
    if document == "kernels" and number == 7:
        return {"my_tpu_kernel": kernel_of_the_user()}
    return {}


def kernel_of_the_user():
    from inl.kernels import tpu_kernel

    return tpu_kernel(lambda x: x @ x.T)


@pytest.fixture
def tiny_model():
    """A language model and its tokenizer, of bytes."""
    checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=256))
    config = MODEL.config(checkpoint.config)
    return LanguageModel(MODEL, config, checkpoint), bytes_as_tokens()


class Document:
    """Runs the blocks of a document in one namespace."""

    def __init__(self, name, request):
        self.name, self.request = name, request
        self.names = common()

    def run(self, number):
        self.names.update(supplies(self.name, number, self.request))
        code = compile(blocks(self.name)[number], f"{self.name} {number}", "exec")
        exec(code, self.names)

    def run_expected(self, number):
        outcome = OUTCOMES.get((self.name, number))
        if outcome is None or (outcome is NO_TPU and Device("tpu").is_available()):
            return self.run(number)
        kind, message = outcome
        with pytest.raises(kind, match=message):
            self.run(number)
        return None


def same(found, exact, bound):
    exact = np.asarray(exact, np.float64)
    off = np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max()
    assert off < bound


def check_dynamics(names):
    # v' = 0.25 - 0.5 * 0, x' = 0.5 + 0.1 * 0.5 * v'
    same(names["v_next"], np.full((2, 3), 0.25), 1e-6)
    same(names["x_next"], np.full((2, 3), 0.5125), 1e-6)


def check_engine(names):
    engine, output = names["engine"], names["output"]
    again = engine.generate("Hello, how are you?", max_tokens=100)
    assert len(output.token_ids) == 100
    assert again.token_ids == output.token_ids
    engine.close()


def check_optimizers(names):
    model = names["model"]
    (layer,) = model.quantization.layers
    assert layer.bytes_after == layer.bytes_before // 2
    assert 0 < layer.error < 2**-8
    assert names["config"].data_parallel == 8
    assert names["config"].fits


def check_product(names):
    assert names["result"].shape == (1024, 1024)
    same(names["result"], np.full((1024, 1024), 1024), 1e-6)
    same(names["out"], np.ones((16, 8, 512, 64)), 1e-5)


def check_custom_call(names):
    called = names["tpu_custom_call"]("custom_matmul", names["x"], names["y"])
    same(called, names["result"], 1e-6)


def check_attention(names):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 200, 16))
    found = names["self_attention_layer"](
        *(jnp.asarray(x, "float32") for x in (q, k, v))
    )
    scores = q @ k.swapaxes(1, 2) / 4
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    same(found, weights @ v, 1e-5)


def check_matmul(names):
    a, b = np.random.default_rng(0).standard_normal((2, 160, 160))
    x, y = jnp.asarray(a, "float32"), jnp.asarray(b, "float32")
    found = names["efficient_matmul"](x, y)
    same(found, a @ b, 1e-2)
    assert np.abs(np.asarray(found) - a @ b).max() > 1e-3, "not rounded to bfloat16"


def check_norm(names):
    x = np.random.default_rng(0).standard_normal((5, 32))
    w, b = np.random.default_rng(1).standard_normal((2, 32))
    held = (jnp.asarray(each, "float32") for each in (x, w, b))
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    same(names["optimized_layer_norm"](*held), normal * w + b, 1e-5)


CHECKS = {
    ("tpu_inl", 0): check_dynamics,
    ("tpu_inl", 1): check_engine,
    ("tpu_inl", 2): check_optimizers,
    ("tpu_kernels", 0): check_product,
    ("tpu_kernels", 1): check_custom_call,
    ("tpu_optimized_kernels", 2): check_attention,
    ("tpu_optimized_kernels", 3): check_matmul,
    ("tpu_optimized_kernels", 4): check_norm,
    ("tpu_optimized_kernels", 10): lambda names: names["test_tpu_kernel"](),
    ("tpu_optimized_kernels", 11): lambda names: names["benchmark_kernel"](),
}
"""(document, block) -> a function of the names after the block."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block(name, request):
    document = Document(name, request)
    for number in range(len(blocks(name))):
        document.run_expected(number)
        check = CHECKS.get((name, number))
        if check:
            check(document.names)


def test_the_blocks_on_a_device_that_stands_for_a_tpu(request, monkeypatch, capsys):
    """The blocks that need a TPU, on a JAX backend under its name."""
    module = request.getfixturevalue("jax_module")
    monkeypatch.setattr(place, "make_backend", module.jax_backend())
    place.place_of.cache_clear()
    document = Document("tpu_devices", request)
    try:
        for number in (3, 4, 5, 6):
            document.run(number)
        assert document.names["output"].shape == (1, 5)
        assert isinstance(document.names["c"].array, jax.Array)
        assert document.names["c"].numpy().tolist() == [[19, 22], [43, 50]]
    finally:
        place.place_of.cache_clear()
