"""The blocks of the documents that INL replaces: their code, what they leave undefined,
and what their results must be.

Arrays are those of JAX, NumPy or torch: ``array_kind`` is the module that takes the
place of ``jax.numpy`` in a block.
"""

from __future__ import annotations

import importlib
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import numpy as np

from inl import kernels
from inl.kernels.tpu import register_tpu_op

DATA = Path(__file__).parents[1] / "data" / "documents"
DOCUMENTS = sorted(path.stem for path in DATA.glob("*.txt"))
MODULES = {"jax": "jax.numpy", "numpy": "numpy", "torch": "torch"}
JAX_ONLY = {
    ("tpu_kernels", 1), ("tpu_optimized_kernels", 1), ("tpu_optimized_kernels", 5),
    ("tpu_optimized_kernels", 6), ("tpu_optimized_kernels", 7),
    ("tpu_optimized_kernels", 9),
}  # fmt: skip
"""(document, block) of blocks on JAX itself."""


def blocks(document):
    text = (DATA / f"{document}.txt").read_text("utf-8")
    # The documents write "..." for parameters, which is not Python.
    text = text.replace("(...)", "(*operands)")
    return [part.split("\n", 1)[1] for part in text.split("# %% ")[1:]]


def optional(name):
    """A module, or nothing that has its names where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def kernel_of_the_user():
    return kernels.tpu_kernel(lambda x: x @ x.T)


class Document:
    """Runs the blocks of a document in one namespace.

    model: returns a language model and its tokenizer. replaced: text of blocks ->
    other text.
    """

    def __init__(self, name, model, array_kind="jax", replaced=()):
        self.name, self.model, self.array_kind = name, model, array_kind
        self.xp = importlib.import_module(MODULES[array_kind])
        self.replaced = {
            "import jax.numpy as jnp": "",
            "jnp.ndarray": "object",
            **dict(replaced),
        }
        if array_kind != "jax":
            self.replaced |= {"import jax\n": "\n", "devices = jax.devices()": ""}
        self.names = self.common()
        self.checks = CHECKS

    def array(self, x):
        """Float32 of a host array, of the kind and its default device."""
        return self.xp.asarray(np.asarray(x, np.float32))

    def data(self):
        return self.array(np.arange(12).reshape(3, 4))

    def common(self):
        jax, torch = optional("jax"), optional("torch")
        precision = jax.lax.Precision if jax else SimpleNamespace(HIGH="high")
        names = {
            name: getattr(kernels, name)
            for name in (
                "tpu_kernel", "gpu_kernel", "sparse_kernel", "expert_kernel",
                "KernelError", "DeviceError",
            )
        }  # fmt: skip
        names |= {
            "__name__": "documents", "register_tpu_op": register_tpu_op,
            "jnp": self.xp, "torch": torch, "Optional": Optional, "time": time,
            "PrecisionConfig": precision, "data": self.data(),
            "xla_client": SimpleNamespace(PrecisionConfig=precision),
            "logger": logging.getLogger("documents"),
        }  # fmt: skip
        if jax is not None:
            names |= {
                "jax": jax, "PartitionSpec": jax.sharding.PartitionSpec,
                "devices": np.array(jax.devices()[:1]).reshape(1, 1),
            }  # fmt: skip
        return names

    def supplies(self, number):
        """What a block leaves undefined, besides the common names."""
        if self.name == "tpu_inl":
            return self.supplies_of_engines(number)
        if self.name == "tpu_optimized_kernels":
            sizes = ("batch", "height", "width", "channels")
            return {
                **dict.fromkeys(sizes, 256), "a": self.data(), "b": self.data().T,
                "my_tpu_kernel": kernel_of_the_user(), "expected_shape": (128, 128),
            }  # fmt: skip
        if self.name == "tpu_kernels" and number == 1:
            return {"y": self.array(np.ones((1024, 1024)))}
        if self.name == "kernels" and number == 7:
            return {"my_tpu_kernel": kernel_of_the_user()}
        return {}

    def supplies_of_engines(self, number):
        if number == 0:
            names = ("x", "v", "mu", "alpha", "beta", "gate")
            return dict.fromkeys(names, self.array(np.full((2, 3), 0.5)))
        if number == 1:
            model, tokenizer = self.model()
            return {"model": model, "tokenizer": tokenizer}
        torch = importlib.import_module("torch")
        return {"model": torch.nn.Sequential(torch.nn.Linear(3, 4))}

    def run(self, number):
        """Run a block and check its results."""
        self.names.update(self.supplies(number))
        text = blocks(self.name)[number]
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        exec(compile(text, f"{self.name} {number}", "exec"), self.names)
        if check := self.checks.get((self.name, number)):
            check(self)

    def host(self, name):
        """A result as float64 on the host."""
        return on_host(self.names[name])


def on_host(x):
    x = x.detach().cpu() if hasattr(x, "detach") else x
    return np.asarray(x, np.float64)


def same(found, exact, bound):
    exact = np.asarray(exact, np.float64)
    off = np.abs(on_host(found) - exact).max() / np.abs(exact).max()
    assert off < bound, off


def check_dynamics(document):
    # v' = 0.25 - 0.5 * 0, x' = 0.5 + 0.1 * 0.5 * v'
    same(document.names["v_next"], np.full((2, 3), 0.25), 1e-6)
    same(document.names["x_next"], np.full((2, 3), 0.5125), 1e-6)
    assert type(document.names["x_next"]) is type(document.array([1]))


def check_engine(document):
    engine, output = document.names["engine"], document.names["output"]
    again = engine.generate("Hello, how are you?", max_tokens=100)
    assert len(output.token_ids) == 100
    assert again.token_ids == output.token_ids
    engine.close()


def check_optimizers(document):
    model = document.names["model"]
    (layer,) = model.quantization.layers
    assert layer.bytes_after == layer.bytes_before // 2
    assert 0 < layer.error < 2**-8
    assert document.names["config"].data_parallel == 8
    assert document.names["config"].fits


def check_product(document):
    assert tuple(document.names["result"].shape) == (1024, 1024)
    same(document.names["result"], np.full((1024, 1024), 1024), 1e-6)
    same(document.names["out"], np.ones((16, 8, 512, 64)), 1e-5)
    assert type(document.names["out"]) is type(document.array([1]))


def check_custom_call(document):
    names = document.names
    called = names["tpu_custom_call"]("custom_matmul", names["x"], names["y"])
    same(called, names["result"], 1e-6)


def check_attention(document):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 200, 16))
    layer = document.names["self_attention_layer"]
    found = layer(*map(document.array, (q, k, v)))
    scores = q @ k.swapaxes(1, 2) / 4
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    same(found, weights @ v, 1e-5)


def check_matmul(document):
    a, b = np.random.default_rng(0).standard_normal((2, 160, 160))
    found = document.names["efficient_matmul"](document.array(a), document.array(b))
    same(found, a @ b, 1e-2)
    assert np.abs(on_host(found) - a @ b).max() > 1e-3, "not rounded to bfloat16"


def check_norm(document):
    x = np.random.default_rng(0).standard_normal((5, 32))
    w, b = np.random.default_rng(1).standard_normal((2, 32))
    held = map(document.array, (x, w, b))
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    same(document.names["optimized_layer_norm"](*held), normal * w + b, 1e-5)


def check_matrix(document):
    assert document.names["c"].numpy().tolist() == [[19, 22], [43, 50]]


def check_network(document):
    assert document.names["output"].shape == (1, 5)


CHECKS = {
    ("tpu_inl", 0): check_dynamics,
    ("tpu_inl", 1): check_engine,
    ("tpu_inl", 2): check_optimizers,
    ("tpu_devices", 4): check_matrix,
    ("tpu_devices", 5): check_network,
    ("tpu_kernels", 0): check_product,
    ("tpu_kernels", 1): check_custom_call,
    ("tpu_optimized_kernels", 2): check_attention,
    ("tpu_optimized_kernels", 3): check_matmul,
    ("tpu_optimized_kernels", 4): check_norm,
    ("tpu_optimized_kernels", 10): lambda document: document.names["test_tpu_kernel"](),
    ("tpu_optimized_kernels", 11): (
        lambda document: document.names["benchmark_kernel"]()
    ),
}
"""(document, block) -> a check of the document after the block."""
