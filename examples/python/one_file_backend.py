"""A backend in one file: a device ``mini``, its check, and an answer of a model on it.

pip install "./core[cli]"
python examples/python/one_file_backend.py

It has one kernel of its own; all other ops run their NumPy bodies. ``inl new-plugin``
makes a package, and docs/writing-a-backend.md explains each part.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from inl import EngineConfig, InferenceEngine
from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.cli.main import main as inl
from inl.device import DeviceInfo
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import hookimpl, simple_backend
from inl.spec.kernel import Kernel


def tensor(host):
    """Copy an array to the device, which here is float32 in host memory."""
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def linear(x, w):
    """Multiply by a matrix [out, in]: the kernel of this device."""
    y = x @ w.weight.T
    return y if w.bias is None else y + w.bias


def kernels():
    yield Kernel("linear", "mini", linear, preference=1)
    for op in catalog().values():
        if not op.composite:
            yield Kernel(op.name, "body", body_kernel(op, "float32"))


Backend = simple_backend(
    tensor=tensor, numpy=wrap, kernels=kernels, traits=Traits(dtypes=("float32",))
)


@hookimpl
def inl_register_backends(register):
    register("mini", Backend, probe=lambda: [DeviceInfo(0, "mini (NumPy)")])


def main() -> None:
    # A package has an entry point in pyproject.toml instead.
    here = Path(__file__).resolve()
    os.environ["INL_PLUGINS"] = here.stem
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if inl(["check", "mini:0", "--op", "linear"]):
        sys.exit("a check failed")
    config = EngineConfig(backend="mini:0", context=128)
    with InferenceEngine.from_pretrained(config=config) as engine:
        answer = engine.generate("The capital of France is", max_tokens=8, stop="\n")
        print(f"mini:0 says:{answer.text}")


if __name__ == "__main__":
    main()
