"""One plan of loading: what is explained is what a runner computes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import partial

import pytest

from explained_kernels import (
    assert_explained,
    draft_head,
    explained,
    labels,
    language,
    recorded_kernels,
)
from inl.backend.base import DeviceMemory, Ranks
from inl.backend.provisional import WeightCopies, WholeModels
from inl.backend.reference import ReferenceBackend, Rendezvous, ThreadCollectives
from inl.backend.state_bytes import array_bytes
from inl.cli.explain import explain
from inl.cli.traced_step import open_backend
from inl.config import EngineConfig
from inl.device import Device
from inl.errors import BackendUnavailable, RequestError, RunnerError
from inl.executor.cache_sizing import weight_bytes
from inl.executor.load_plan import LoadPlan
from inl.placement.mesh import Mesh
from inl.placement.placement import Placement
from inl.progress import ProgressReporter
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import start_runner
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint

DEVICE = Device("reference")
F32 = "float32"
OPTIONS = {
    "plain": {},
    "adapters": {"max_adapters": 2, "max_adapter_rank": 4},
    "quantize": {"quantize": "int8"},
    "kv_dtype": {"kv_dtype": "fp8"},
    "dtype": {"dtype": "bfloat16"},
    "hosted": {"allow_hosted": True},
}


def config_of(**options):
    return EngineConfig(backend="reference", context=64, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernels_that_are_explained_are_computed(name, monkeypatch):
    config = config_of(**OPTIONS[name])
    assert_explained(ReferenceBackend(DEVICE), config, monkeypatch)


def test_the_cache_leaves_room_for_the_weights_on_a_device(monkeypatch):
    """Their bytes are those that are loaded then, with each tied tensor once."""
    backend, model = ReferenceBackend(DEVICE), language()
    config = EngineConfig(backend="reference", context=64, max_batch=2)

    def blocks(free):
        memory = DeviceMemory(free, free)
        monkeypatch.setattr(ReferenceBackend, "memory", lambda _: memory)
        return LoadPlan.of(model, backend, config).limits.blocks[0] - 1

    plan = LoadPlan.of(model, backend, config)
    arrays = {id(leaf): leaf for leaf in leaves(plan.load(ProgressReporter()).weights)}
    weights = sum(each.nbytes for each in arrays.values())
    found = weight_bytes(plan.unloaded.groups, "float32")
    assert weights <= found <= 1.01 * weights
    # A quarter of what is free; a block more for each block's bytes, on host memory.
    free = 64 * found
    monkeypatch.setattr("inl.executor.load_plan.is_host_memory", lambda _: True)
    most = blocks(free)
    block = free / 4 / most
    monkeypatch.undo()
    lost = (most - blocks(free)) * block
    assert lost == pytest.approx(found / 4, abs=2 * block)


class Copying(ReferenceBackend):
    """Packs feed-forward layers, with copies of as many bytes as the weights."""

    def kernels(self):
        yield from super().kernels()
        yield from self.packing(copies=False)

    def packing(self, *, copies):
        def pack(*_):
            return copies

        yield Kernel("gated_mlp", "packed", None, layout="both", pack=pack)

    def offers(self, kind):
        if kind is WeightCopies:
            kernels = partial(self.packing, copies=True)
            return WeightCopies(kernels, lambda specs: array_bytes(specs.up.shape, F32))
        return super().offers(kind)


def test_copies_of_weights_take_memory_that_is_left(monkeypatch):
    model, base = language(), config_of()
    layers = model.config.layers
    copies = layers * array_bytes((96, 64), F32)

    def plan(free, **options):
        memory = DeviceMemory(free, free)
        monkeypatch.setattr(Copying, "memory", lambda _: memory)
        found = LoadPlan.of(model, Copying(DEVICE), replace(base, **options))
        group = found.unloaded.groups.layers[0].mlp.mlp
        has_copies = group.kernel.pack()
        assert found.copied_bytes == (copies if has_copies else 0)
        assert any("copies in 8 bits" in note for note in found.notes) == has_copies
        return found

    weights = weight_bytes(plan(1 << 30).unloaded.groups, "float32")
    least = weights + 4 * copies
    assert plan(least).copied_bytes
    assert not plan(least - 1).copied_bytes
    assert not plan(least - 1, weight_copies=False).copied_bytes
    assert not plan(1 << 30, weight_copies=False).copied_bytes
    assert plan(least - 1, weight_copies=True).copied_bytes
    wider = plan(least, weight_copies=False)
    assert plan(least).limits.blocks[0] < wider.limits.blocks[0]
    kept = 1 << 20
    assert plan(least + kept, cache_bytes=kept).copied_bytes
    assert not plan(least + kept - 1, cache_bytes=kept).copied_bytes
    with pytest.raises(RequestError, match="weight_copies: found True, but reference"):
        LoadPlan.of(model, ReferenceBackend(DEVICE), replace(base, weight_copies=True))
    with pytest.raises(RequestError, match="weight_copies: found 'yes'"):
        config_of(weight_copies="yes")


@pytest.mark.parametrize("adapters", [0, 1])
def test_the_kernels_of_a_draft_head(adapters, tmp_path, monkeypatch):
    config = config_of(
        speculation="eagle", draft_model=draft_head(tmp_path / "head"),
        adaptive_drafts=False, max_adapters=adapters or None,
    )  # fmt: skip
    backend = ReferenceBackend(DEVICE)
    assert_explained(backend, config, monkeypatch)
    step = explained(backend, config, 1, 1)
    assert "join_lanes/numpy" in labels(explain(step.tracer)), "the taps"
    assert step.draft_head is not None


def test_adapters_divide_the_feed_forward_layer():
    backend = ReferenceBackend(DEVICE)
    tables = [
        {row["op"] for row in explain(explained(backend, config, 1, 1).tracer)}
        for config in (config_of(), config_of(max_adapters=1))
    ]
    assert "norm_mlp" in tables[0] - tables[1]


def test_the_kernels_of_a_rank(monkeypatch):
    """Explained on one device that is in no group."""
    backend = ReferenceBackend(DEVICE)
    step = explained(backend, config_of(tensor_parallel=2), 5, 1)
    found = labels(explain(step.tracer))
    assert {"all_reduce/ranks", "all_gather/ranks"} <= found
    rendezvous = Rendezvous(2, seconds=60)
    bound_of = [set(), set()]

    def make(rank):
        collectives = ThreadCollectives(2, rank, rendezvous)
        own = ReferenceBackend(DEVICE, collectives=collectives)
        runner = start_runner(language(), own, config_of(), rank=rank)
        if rank == 0:
            runner.executor._ops.clear()
            with recorded_kernels(monkeypatch) as (bound, _):
                runner.executor.ops(Bucket(5, 1))
            bound_of[0] |= bound
        return runner

    RankRunner(make, 2, abort=rendezvous.abort).close()
    assert found == bound_of[0]


def test_the_weights_of_a_planned_rank_are_its_part_and_cannot_be_loaded():
    config = config_of(tensor_parallel=2)
    plan = LoadPlan.of(language(), ReferenceBackend(DEVICE), config)
    whole = LoadPlan.of(language(), ReferenceBackend(DEVICE), config_of())
    sizes = [
        each.unloaded.groups.layers[0].mlp.mlp.specs("float32").gate.shape
        for each in (whole, plan)
    ]
    assert sizes == [(96, 64), (48, 64)]
    with pytest.raises(RunnerError, match="plan for a rank of 2 outside"):
        plan.load(ProgressReporter())


def test_kernels_of_a_mesh_reduce_over_it_themselves(monkeypatch):
    mesh = Mesh(Placement(tensor=2), None, 1, None, None)
    monkeypatch.setattr(
        ReferenceBackend, "offers", lambda _, kind: mesh if kind is Mesh else None
    )
    plan = LoadPlan.of(
        language(),
        ReferenceBackend(DEVICE),
        config_of(),
        limits=Limits(3, (9,), 16, 4, 96),
    )
    found = labels(explain(plan.tracer(Bucket(1, 1))))
    assert "all_reduce/numpy" in found
    assert plan.unloaded.ranks == 2


def test_a_device_without_ranks_is_refused(monkeypatch):
    offers = ReferenceBackend.offers
    monkeypatch.setattr(
        ReferenceBackend,
        "offers",
        lambda self, kind: None if kind is Ranks else offers(self, kind),
    )
    with pytest.raises(BackendUnavailable, match="does not support 2 ranks"):
        open_backend(config_of(tensor_parallel=2))


def test_an_axis_that_ranks_do_not_divide_is_refused():
    words = "placement data=2,pipeline=2: found data=2 with pipeline=2; accepted: one"
    with pytest.raises(RequestError, match=words):
        open_backend(config_of(placement="data=2,pipeline=2"))


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_all_layers_at_once_are_described_where_a_runner_computes_them_so(
    taken, invariant, monkeypatch
):
    """An optional whole model does not compute what the ops have to."""
    whole = WholeModels(
        lambda model: replace(model), optional=not taken, describe=lambda *_: "at once"
    )
    offers = ReferenceBackend.offers

    def offering(self, kind):
        return whole if kind is WholeModels else offers(self, kind)

    def kernels(self):
        return [replace(kernel, invariant=True) for kernel in listed(self)]

    listed = ReferenceBackend.kernels
    monkeypatch.setattr(ReferenceBackend, "offers", offering)
    monkeypatch.setattr(ReferenceBackend, "kernels", kernels)
    config, backend = config_of(invariant=invariant), ReferenceBackend(DEVICE)
    plan = LoadPlan.of(language(), backend, config)
    runner = start_runner(language(), backend, config)
    is_used = runner.executor._model is not runner.loaded.model
    assert bool(plan.describe_layers(Bucket(1, 1))) == is_used
    assert is_used == (taken or not invariant)


def test_programs_with_more_tokens_are_explained_as_they_are_padded(monkeypatch):
    sizes = (Bucket(1, 1), Bucket(8, 4), Bucket(64, 4))
    compiled = [
        bucket._replace(sampler=sampler)
        for bucket in sizes
        for sampler in ("greedy", "sample_filtered")
    ]
    monkeypatch.setattr(ReferenceBackend, "buckets", lambda *_: compiled)
    backend = ReferenceBackend(DEVICE)
    step = explained(backend, config_of(), 5, 2)
    assert step.tracer.bucket == Bucket(8, 4)
    assert_explained(backend, config_of(), monkeypatch)
    with pytest.raises(
        RequestError, match="found 65 tokens in 1 rows, accepted: up to"
    ):
        explained(backend, config_of(), 65, 1)


def test_a_plan_reads_no_tensor_and_does_not_change(monkeypatch):
    def read(self, name):
        raise AssertionError(f"read {name}")

    opened = language()
    shapes = {name: opened.checkpoint.spec(name) for name in opened.checkpoint.names()}
    monkeypatch.setattr(MemoryCheckpoint, "tensor", read)
    monkeypatch.setattr(MemoryCheckpoint, "spec", lambda _, name: shapes[name])
    config = config_of(quantize="int8", max_adapters=1)
    plan = LoadPlan.of(opened, ReferenceBackend(DEVICE), config)
    plan.tracer(Bucket(1, 1))
    assert plan.notes
    with pytest.raises(FrozenInstanceError):
        plan.limits = None


def test_a_tied_head_that_is_a_copy_is_planned_by_its_shape_and_loaded_once():
    files = language().checkpoint
    tensors = {name: files.tensor(name) for name in files.names()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tied = MemoryCheckpoint({**files.config, "tie_word_embeddings": True}, tensors)
    opened = replace(
        language(), checkpoint=tied, config=language().model.config(tied.config)
    )
    plan = LoadPlan.of(opened, ReferenceBackend(DEVICE), config_of())
    loaded = plan.load(ProgressReporter())
    sources = [
        parts.groups.head.group.params["weight"].source
        for parts in (plan.unloaded, loaded)
    ]
    assert sources == ["lm_head.weight", "model.embed_tokens.weight"]
