"""Templates of a new backend package; ``$name`` is its device type.

``examples/inl-toy`` is their output for ``toy``; docs/writing-a-backend.md shows it.
"""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).with_name("scaffold_data")

COMMON = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$distribution"
version = "0.1.0"
description = "INL on $name devices"
readme = "README.md"
$license
requires-python = ">=3.11"
dependencies = [$dependencies]

[project.optional-dependencies]
test = ["inl-core[testing]"]

[project.entry-points."inl.v2"]
$name = "inl_$name.plugin"

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
testpaths = ["tests"]
""",
    "README.md": """\
# $distribution

INL on `$name` devices.

```sh
pip install .
inl check $name:0
inl generate --device $name:0 "Why is the sky blue?"
```

`src/inl_$name/plugin.py` registers the backend, `src/inl_$name/backend.py` implements
it, and `tests/test_contract.py` runs the conformance tests:

```sh
pip install -e ".[test]"
pytest
```
""",
    "src/inl_$name/__init__.py": '''\
"""INL on $name devices."""
''',
    "tests/test_contract.py": '''\
"""The conformance tests that ``inl check $name:0`` runs."""

from inl.testing import Conformance


class TestBackend(Conformance):
    device = "$name:0"
''',
}
"""Path -> text of every style; both are :class:`string.Template` sources."""

EAGER = {
    "src/inl_$name/plugin.py": '''\
"""Entry point ``$name``: registers the backend; imports only ``inl``."""

from inl.device import DeviceInfo
from inl.plugin import hookimpl


def probe():
    """List the devices; raise BackendUnavailable with the reason if there are none."""
    return [DeviceInfo(0, "$name (NumPy in float32)")]


@hookimpl
def inl_register_backends(register):
    register("$name", "inl_$name.backend:Backend", probe=probe)
''',
    "src/inl_$name/backend.py": '''\
"""The $name device: NumPy in float32, six kernels, and op bodies for the rest."""

import numpy as np

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel


def tensor(host):
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def linear(x, w):
    y = x @ w.weight.T
    return y if w.bias is None else y + w.bias


def rms_norm(x, w, *, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w.weight


def rope(q, k, cos, sin):
    rotation = (cos + 1j * sin)[:, None]
    half = cos.shape[-1]
    rotated = [(x[..., :half] + 1j * x[..., half:]) * rotation for x in (q, k)]
    return tuple(np.concatenate([z.real, z.imag], -1) for z in rotated)


def gated_activation(gate, up, *, activation):
    return gate / (1 + np.exp(np.minimum(-gate, 80))) * up


def only_silu(gate, up, *, activation):
    return None if activation == "silu" else f"supports silu, not {activation}"


def write_kv(k, v, cache, writes):
    cells = np.divmod(writes, cache.k.shape[1])
    cache.k[cells], cache.v[cells] = k, v
    return cache


def attention(q, cache, step, *, scale, window, cap, group):
    out, (heads, dim) = np.zeros_like(q), q.shape[1:]
    for row in np.flatnonzero(step.lengths):
        tokens, length = slice(*step.starts[row : row + 2]), step.lengths[row]
        blocks = (part[step.blocks[group, row]] for part in cache[:2])
        k, v = (x.reshape(-1, x.shape[2], dim)[:length] for x in blocks)
        k, v = (x.repeat(heads // x.shape[1], 1).swapaxes(0, 1) for x in (k, v))
        scores = q[tokens].swapaxes(0, 1) @ k.swapaxes(1, 2) * np.float32(scale)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        distance = step.positions[tokens, None] - np.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        scores = np.where(mask, scores, np.float32(-1e30))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[tokens] = (weights @ v).swapaxes(0, 1)
    return out


def kernels():
    for run in (linear, rms_norm, rope, write_kv, attention):
        yield Kernel(run.__name__, "$name", run, preference=1)
    yield Kernel("gated_activation", "$name", gated_activation, only_silu, preference=1)
    for op in catalog().values():
        if not op.composite:
            yield Kernel(op.name, "body", body_kernel(op, "float32"))


Backend = simple_backend(
    tensor=tensor, numpy=wrap, kernels=kernels, traits=Traits(dtypes=("float32",))
)
''',
}
"""Files of an eager backend: NumPy, one op after the other."""


def traced() -> dict[str, str]:
    """Return the files of a backend whose programs ``jax.jit`` compiles."""
    return {
        f"src/inl_$name/{name}.py": (DATA / f"{name}.py.txt").read_text("utf-8")
        for name in ("plugin", "backend", "kernels")
    }


STYLES = {"eager": ("numpy>=1.26",), "traced": ("numpy>=1.26", "jax>=0.5")}
"""Style -> what its package requires beside ``inl-core``."""

APACHE = """\
Copyright the authors of $distribution

Licensed under the Apache License, Version 2.0 (the "License"); you may not use this
package except in compliance with the License. You may obtain a copy of the License at

    https://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software distributed under
the License is distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY
KIND, either express or implied. See the License for the specific language governing
permissions and limitations under the License.
"""

MIT = """\
Copyright the authors of $distribution

Permission is hereby granted, free of charge, to any person obtaining a copy of this
software and associated documentation files (the "Software"), to deal in the Software
without restriction, including without limitation the rights to use, copy, modify,
merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
permit persons to whom the Software is furnished to do so, subject to the following
conditions:

The above copyright notice and this permission notice shall be included in all copies
or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED,
INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR
PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE
LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT
OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR
OTHER DEALINGS IN THE SOFTWARE.
"""

LICENSES = {"Apache-2.0": APACHE, "MIT": MIT, "none": ""}
"""Text of the file LICENSE by SPDX name; "none" writes no such file."""
