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

from depth import mostly_drawn

WORKER = Path(__file__).parent / "aot_mesh.py"
LAYERS, SHARE = 2, "bf16[32,4096]"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install 'inl-tpu[compiler]'",
    ),
    pytest.mark.timeout(1800),
]


def compiled(*arguments):
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def gathered_caches(facts):
    """Gathers of as many elements as a cache of one device has, or more."""
    shapes = [re.findall(r"\[([\d,]+)\]", each) for each in facts["all-gather"]]
    sizes = [math.prod(map(int, dims.split(","))) for each in shapes for dims in each]
    return [size for size in sizes if size >= math.prod(facts["cache"])]


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "mesh", "kv_heads"),
    mostly_drawn([
        ("v5e:2x4", "tensor=8", 1),
        ("v5p:2x2x1", "tensor=4", 2),
        ("v6e:2x2", "tensor=4", 2),
        ("tpu7x:2x2x1", "tensor=4", 2),
    ]),
)  # fmt: skip
def test_a_step_reduces_twice_a_layer(capsys, topology, mesh, kv_heads):
    facts = compiled(topology, mesh, LAYERS)
    with capsys.disabled():
        print(f"\n{facts}")
    check_step(facts)
    assert facts["cache"][1] == kv_heads
    assert facts["packed products"] == 0


def check_step(facts):
    """Two sums of a layer, no gather but of the logits, all caches in place."""
    assert len(facts["all-reduce"]) == 2 * LAYERS
    assert all(each.startswith(SHARE) for each in facts["all-reduce"])
    assert len(facts["all-gather"]) == 1, "the logits"
    assert gathered_caches(facts) == facts["others"] == []
    assert facts["attentions"] == LAYERS
    assert facts["callbacks"] == 0
    assert facts["aliased bytes"] >= 2 * LAYERS * math.prod(facts["cache"])


def one_part(kind):
    """Bytes of the layers' matrices on one of four devices; kind: of the file."""
    hidden, inner = 4096, 14336
    inputs = hidden * (2 * hidden + 2 * 1024 + 3 * inner) // 4
    bits = {"q8_0": 8.5, "q4_0": 4.5, "float8_e4m3": 8, "": 16}[kind]
    return LAYERS * inputs * bits / 8


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "q8_0",
        pytest.param("q4_0", marks=pytest.mark.long),
        pytest.param("float8_e4m3", marks=pytest.mark.long),
    ],
)
def test_packed_weights_stay_packed_in_a_step(kind):
    """Seven products of a layer; the step has as many bytes less as the file."""
    facts = compiled("v6e:2x2", "tensor=4", LAYERS, "", kind)
    plain = compiled("v6e:2x2", "tensor=4", LAYERS)
    check_step(facts)
    assert facts["packed products"] == 7 * LAYERS
    saved = plain["bytes"] - facts["bytes"]
    assert saved > 0.9 * (one_part("") - one_part(kind))


@pytest.mark.long
def test_packed_weights_beside_divided_blocks():
    """Attention is XLA's, which adds a maximum and two sums of a layer."""
    facts = compiled("v6e:2x2", "tensor=2,data=2", LAYERS, "", "q4_1")
    assert facts["packed products"] == 7 * LAYERS
    assert facts["attentions"] == 0
    assert gathered_caches(facts) == facts["others"] == []
    assert sum(each.startswith(SHARE) for each in facts["all-reduce"]) == 2 * LAYERS
    assert facts["aliased bytes"] >= 2 * LAYERS * math.prod(facts["cache"])


@pytest.mark.full
def test_a_gathered_cache_is_found():
    facts = compiled("v6e:2x2", "tensor=4", 1, "gather")
    assert gathered_caches(facts)
