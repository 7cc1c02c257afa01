"""Models over meshes of virtual devices against the float64 reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inl.backend.collectives import AbsentVerb
from inl.errors import BackendUnavailable, DeviceError, RequestError
from inl.placement.placement import Placement, parse_placement
from inl.plugin import make_backend
from inl.runners.startup import over_mesh
from inl.spec.op import Spec
from inl_jax import validate_sharding
from inl_jax.mesh.collectives import MeshCollectives

FOLDER = Path(__file__).parent
SECONDS = 600


def run(*cases):
    done = subprocess.run(
        [sys.executable, str(FOLDER / "mesh_worker.py"), *cases],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_traffic(facts, divided):
    """Texts of some length and variety, equal; logits equal to rounding."""
    assert facts["mesh"] == facts["alone"]
    tokens = [token for text in facts["mesh"].values() for token in text]
    assert len(tokens) > 30
    assert len(set(tokens)) > 5
    assert 0 < facts["error"] < 1e-4
    assert facts["divided"] == divided


def test_meshes_are_read():
    assert parse_placement("tensor=4, data=2") == Placement(data=2, tensor=4)
    assert str(parse_placement("expert=2,tensor=4")) == "tensor=4,expert=2"
    for wrong in ("", "tensor", "rows=2", "tensor=0", "tensor=2,tensor=2", "data=x", 3):
        with pytest.raises(RequestError, match="accepted: AXIS=SIZE"):
            parse_placement(wrong)


@pytest.mark.parametrize(
    "placement", ["data=2,tensor=2,expert=2", "pipeline=2,tensor=4"]
)
def test_verbs_are_their_bodies(placement):
    """On eight devices, along each axis of the placement, of size 1 too."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "mesh_verbs.py"), placement],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"wrong": [], "compared": 4 * 4 * 3 * 8}


def test_what_one_program_cannot_do_is_refused():
    verbs = MeshCollectives(Placement(tensor=2))
    x = jax.numpy.ones(2)
    for call in (
        lambda: verbs.send(x, "tensor", 1),
        lambda: verbs.recv(Spec((2,), "float32"), "tensor", 1),
        lambda: verbs.barrier("tensor"),
    ):  # fmt: skip
        with pytest.raises(AbsentVerb, match="MeshCollectives does not offer"):
            call()
    with pytest.raises(
        BackendUnavailable, match="found pipeline=2; models are divided"
    ):
        over_mesh(make_backend("tpu:0"), Placement(pipeline=2))


def test_a_wrong_sharding_is_named():
    mesh = Mesh(jax.devices()[:1], ("tensor",))
    placed = NamedSharding(mesh, PartitionSpec("tensor"))
    arrays = {"a": jax.device_put(jax.numpy.ones((4, 2)), placed)}
    (found,) = validate_sharding(arrays, mesh, PartitionSpec("tensor"))
    assert found.name == "a"
    assert found.equal
    two = jax.sharding.AbstractMesh((2,), ("tensor",))
    arrays["b"] = jax.ShapeDtypeStruct(
        (4, 2), "float32", sharding=NamedSharding(two, PartitionSpec())
    )
    expected = {"a": PartitionSpec(), "b": PartitionSpec("tensor")}
    message = r"2 of 2 (?s:.)*\n  b \[4, 2\]: found P\(\) .*, expected P\('tensor'"
    with pytest.raises(DeviceError, match=message):
        validate_sharding(arrays, two, expected)
    arrays["a"] = arrays["b"]
    with pytest.raises(DeviceError, match="1 of 2"):
        validate_sharding(arrays, two, expected)


@pytest.mark.full
def test_models_equal_one_device():
    """Eight heads, 95 tokens; nine of 3 devices; experts over 2x2x2; repeated steps."""
    cases = {
        "traffic odd-vocabulary tensor=8 8": 15,
        "traffic 9-heads tensor=3 1": 8,
        "traffic moe data=2,tensor=2,expert=2 8": 15,
    }
    refusals = {
        "refusal llama tensor=3": "q_proj.weight: axis 0: found 64 entries",
        "refusal llama expert=2": "no weights of the ops experts and expert_linear",
        "refusal llama tensor=16": "needs 16 devices; JAX finds 8",
    }
    cache, hidden = "int8_cache tensor=2,data=2", "pooled tensor=2,data=2"
    found = run(*cases, *refusals, cache, hidden)
    for case, divided in cases.items():
        check_traffic(found[case], divided)
    divided, rounded = found[cache]
    assert 0 < divided < 1e-4 < rounded
    error, size = found[hidden]
    assert error < 1e-4 < 0.1 < size
    for case, sentence in refusals.items():
        assert sentence in found[case]


def check_packed(facts, groups):
    """Texts of a mesh, one device and dequantized weights equal those of float64."""
    for name, texts in facts["texts"].items():
        assert texts == facts["alone"], name
    assert sum(map(len, facts["alone"].values())) > 30
    assert 0 < facts["error"] < 1e-4
    assert facts["packed"] == {"mesh": groups, "one": groups, "plain": 0}
    assert facts["bytes"]["mesh"] < facts["bytes"]["plain"]
    assert facts["bytes"]["mesh"] < facts["bytes"]["one"]
    assert facts["tensors"] > 10


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("none", ""),
        ("sums", "its kernels must reduce over the tensor axis"),
        ("halves", "the values that come back are others"),
    ],
)
def test_inl_check_names_a_fault_of_a_mesh(fault, says):
    done = subprocess.run(
        [sys.executable, str(FOLDER / "mesh_faults.py"), fault],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert says in found if says else found == ""


@pytest.mark.long
def test_packed_weights_stay_packed_on_a_mesh():
    """One of 8 bits; one of 4 bits with biases, two key-value heads, divided blocks."""
    cases = ["packed q8_0 tensor=8", "packed q4_1 tensor=2,data=2"]
    fault = "packed_fault q8_0 tensor=8"
    found = run(*cases, fault)
    for case in cases:
        check_packed(found[case], groups=3)
    assert found[fault] > 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "groups"),
    [
        ("q4_0 tensor=4", 3),
        ("float8_e4m3 tensor=8", 3),
        # Two ranks split a block of 32 inputs: that matrix is not of 8 bits.
        ("q8_0 tensor=2,expert=4 moe", 4),
    ],
)
def test_more_packed_weights_on_meshes(case, groups):
    (facts,) = run(f"packed {case}").values()
    check_packed(facts, groups)


@pytest.mark.long
def test_kinds_of_requests_of_a_mixture():
    for facts in run("answers expert=2", "answers tensor=2,expert=2").values():
        assert facts["tpu:0"] == facts["reference"]
        assert {"greedy", "sampled", "structured", "drafts"} <= facts["tpu:0"].keys()


@pytest.mark.long
def test_more_meshes_equal_one_device():
    """Copied key-value heads, biases of one device, divided blocks."""
    cases = {
        "traffic llama tensor=8 8": 15,
        "traffic moe tensor=2,expert=4 8": 15,
        "traffic moe data=2,tensor=2,expert=2 1": 15,
        "traffic biased-experts tensor=2,expert=2 1": 31,
        "traffic 2-kv-heads data=2,tensor=4 1": 15,
        "traffic biases tensor=8 1": 12,
        "traffic llama data=4 8": 0,
    }
    found = run(*cases)
    for case, divided in cases.items():
        check_traffic(found[case], divided)


@pytest.mark.long
@pytest.mark.parametrize("case", ["tensor=3 none 4", "tensor=3 ngram 1"])
def test_the_default_model_over_three_devices(case):
    """Nine heads and three key-value heads; three requests, two at a time."""
    (facts,) = run(f"engine {case}").values()
    assert all(facts["allowed"])
    assert [len(answer) for answer in facts["mesh"]] == [10, 10, 10]
