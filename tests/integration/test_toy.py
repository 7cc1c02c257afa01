"""The toy backend, from its source tree, and the page that shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "inl-toy"
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text()
SHOWN = [
    "pyproject.toml",
    "src/inl_toy/plugin.py",
    "src/inl_toy/backend.py",
    "tests/test_contract.py",
]


def inl(*words):
    path = os.pathsep.join([str(TOY / "src"), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "inl", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path, "INL_PLUGINS": "inl_toy.plugin"},
    )


@pytest.mark.parametrize("path", SHOWN)
def test_the_page_shows_the_file_as_it_is(path):
    _, _, rest = PAGE.partition(f"`inl-toy/{path}`\n\n```")
    block, end, _ = rest.partition("\n```\n")
    assert end
    assert block.partition("\n")[2] + "\n" == (TOY / path).read_text()


def test_the_page_shows_every_file_that_has_code():
    code = {
        path.relative_to(TOY).as_posix()
        for path in TOY.rglob("*.py")
        if len(path.read_text().splitlines()) > 1 and "build" not in path.parts
    }
    assert code | {"pyproject.toml"} == set(SHOWN)


def test_the_toy_keeps_every_promise():
    card = json.loads(inl("check", "toy:0", "--json").stdout)
    assert card["passed"], card["failures"]
    assert card["gaps"] == {}
    assert card["ops"]["attention"]["kernels"] == ["toy", "body"]


def test_the_toy_is_a_ready_plugin():
    done = inl("plugins")
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("toy ")]
    assert re.search(r"ready\s+1 device", row)


def test_the_packing_example_of_the_page_computes_what_linear_does():
    (source,) = re.findall(r"```python\n(from dataclasses.*?)```", PAGE, re.S)
    space = {"__name__": "page"}
    exec(compile(source, "writing-a-backend.md", "exec"), space)
    kernel = space["KERNEL"]

    from inl.dtypes import wrap
    from inl.spec.op import Spec

    class Host:
        def tensor(self, host):
            return host.data

    rng = np.random.default_rng(4)
    weight, bias, x = (
        rng.standard_normal(shape, np.float32) for shape in ((5, 3), (5,), (2, 3))
    )
    assert kernel.can_pack(weight=Spec((5, 3), "float32")) is None
    for given in (None, bias):
        group = {"weight": wrap(weight), "bias": None if given is None else wrap(bias)}
        w = kernel.pack(group, Host(), "float32")
        assert w.layout == kernel.layout
        want = np.einsum("tk,nk->tn", x, weight) + (0 if given is None else bias)
        np.testing.assert_allclose(kernel.run(x, w), want, rtol=1e-5, atol=1e-5)


def test_the_packing_example_keeps_the_bits_of_bfloat16():
    (source,) = re.findall(r"```python\n(from dataclasses.*?)```", PAGE, re.S)
    space = {"__name__": "page"}
    exec(compile(source, "writing-a-backend.md", "exec"), space)

    from inl.dtypes import cast, widen

    class Host:
        def tensor(self, host):
            return host

    weight = np.random.default_rng(4).standard_normal((5, 3))
    group = {"weight": cast(weight, "bfloat16"), "bias": None}
    packed = space["KERNEL"].pack(group, Host(), "bfloat16").weight
    assert (packed.dtype, packed.shape, packed.data.dtype) == (
        "bfloat16", (3, 5), np.uint16,
    )  # fmt: skip
    assert np.array_equal(widen(packed), widen(group["weight"]).T)


def test_the_readme_shows_the_last_line_of_a_check():
    (shown,) = re.findall(r"^npu:0 passes .*$", (ROOT / "README.md").read_text(), re.M)
    line = inl("check", "toy:0", "--op", "linear").stdout.splitlines()[-1]
    parts = map(re.escape, shown.replace("npu", "toy").split("..."))
    assert re.fullmatch(r"[\d.,]+".join(parts), line), line


def test_the_package_has_less_than_a_hundred_lines_of_python():
    """As the README and the page say."""
    lines = [path.read_text().splitlines() for path in (TOY / "src").rglob("*.py")]
    assert 50 < sum(map(len, lines)) < 100
    assert "under 100 lines of Python" in (ROOT / "README.md").read_text()
    assert "less than a hundred lines" in PAGE
