"""A decoding step of the 8B shape over meshes, compiled for TPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "aot_mesh.py"
LAYERS, SHARE = 2, "bf16[32,4096]"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'inl-tpu[compiler]'",
)


def compiled(*arguments):
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def gathered_caches(facts):
    """Gathers of as many elements as a cache of one device has, or more."""
    shapes = [re.findall(r"\[([\d,]+)\]", each) for each in facts["all-gather"]]
    sizes = [math.prod(map(int, dims.split(","))) for each in shapes for dims in each]
    return [size for size in sizes if size >= math.prod(facts["cache"])]


@pytest.mark.parametrize(
    ("topology", "mesh", "kv_heads"),
    [
        ("v5e:2x4", "tensor=8", 1),
        ("v5p:2x2x1", "tensor=4", 2),
        ("v6e:2x2", "tensor=4", 2),
        ("tpu7x:2x2x1", "tensor=4", 2),
    ],
)
def test_a_step_reduces_twice_a_layer(capsys, topology, mesh, kv_heads):
    facts = compiled(topology, mesh, LAYERS)
    with capsys.disabled():
        print(f"\n{facts}")
    assert len(facts["all-reduce"]) == 2 * LAYERS
    assert all(each.startswith(SHARE) for each in facts["all-reduce"])
    assert len(facts["all-gather"]) == 1, "the logits"
    assert gathered_caches(facts) == facts["others"] == []
    assert facts["attentions"] == LAYERS
    assert facts["callbacks"] == 0
    assert facts["cache"][1] == kv_heads
    assert facts["aliased bytes"] >= 2 * LAYERS * math.prod(facts["cache"])


def test_a_gathered_cache_is_found():
    facts = compiled("v6e:2x2", "tensor=4", 1, "gather")
    assert gathered_caches(facts)
