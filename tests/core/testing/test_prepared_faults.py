"""Faults of what is prepared or kept: ``inl check`` finds each and names it."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.base import CachedMemory, Precompiler, Traits
from inl.backend.reference import body_kernel
from inl.backend.weight_cache import FileIdentity, WeightCache
from inl.dtypes import wrap
from inl.errors import BackendUnavailable
from inl.ops import catalog
from inl.placement.mesh import Mesh, Meshes
from inl.spec.kernel import Kernel
from planted_kernels import failures, target_of, tensor

TRAITS = Traits(dtypes=("float32",), block_size=8, depth=2)


def offering(*capabilities, **fields):
    return target_of(capabilities=capabilities, traits=TRAITS, **fields)


def message_of(target, section, name):
    (found,) = failures(target, section, name)
    return found.first.message


class Kept(WeightCache):
    """Keeps what was loaded under a key of the arguments of ``load``."""

    def __init__(self, key, *, swallows=False):
        self.key, self.swallows, self.kept = key, swallows, {}

    def load(self, files, dtype, load, progress, *, variant=""):
        key = self.key(files, dtype, variant)
        if key in self.kept:
            return self.kept[key]
        try:
            loaded = load()
        except ValueError:
            if self.swallows:
                return None
            raise
        if all(files[path] == FileIdentity.of(path.stat()) for path in files):
            self.kept[key] = loaded
        return loaded


class Hasty(Kept):
    """Keeps weights under the identity that a file has when they were packed."""

    def load(self, files, dtype, load, progress, *, variant=""):
        now = {path: FileIdentity.of(path.stat()) for path in files}
        return super().load(now, dtype, load, progress, variant=variant)


def complete(files, dtype, variant):
    return tuple(files.items()), dtype, variant


def by_path(files, dtype, variant):
    return tuple(files), dtype, variant


def by_file(files, _dtype, _variant):
    return tuple(files.items())


def test_a_right_cache_of_weights_passes():
    target = offering(Kept(complete))
    assert failures(target, "backend", "backend/weight cache") == []


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (Kept(by_path), "after the file was changed"),
        (Kept(by_file), "as another variant"),
        (Hasty(complete), "after a load of a file that was changed since"),
        (Kept(complete, swallows=True), "raised ValueError, and load did not"),
    ],
)
def test_a_cache_of_other_weights_is_named(cache, says):
    found = message_of(offering(cache), "backend", "backend/weight cache")
    assert found.startswith("WeightCache.load")
    assert says in found


def test_a_right_precompiler_passes():
    calls = []
    target = offering(Precompiler(calls.extend))
    assert failures(target, "runner", "runner/precompiled") == []
    assert len(calls) > 2


def test_a_precompiler_that_raises_is_named():
    target = offering(Precompiler(lambda calls: [call() for call in calls]))
    found = message_of(target, "runner", "runner/precompiled")
    assert "a call raised, and so did precompile" in found


def test_a_precompiler_that_leaves_kernels_dry_is_named():
    """Kernels compute nothing while they are only compiled, and afterwards."""
    dry = []

    def kernels():
        for op in catalog().values():
            run = None if op.composite else body_kernel(op, "float32")
            if op.name == "linear":
                run = drying(run)
            if run is not None:
                yield Kernel(op.name, "planted", run)

    def drying(run):
        return lambda x, w: 0 * run(x, w) if dry else run(x, w)

    target = offering(Precompiler(dry.append), kernels=kernels)
    found = message_of(target, "runner", "runner/precompiled")
    assert "after Precompiler.precompile in the middle of a sequence" in found


def test_a_release_of_tensors_in_use_is_named():
    made = []

    def kept(host):
        made.append(tensor(host))
        return made[-1]

    def release():
        for each in made:
            each[...] = 0

    right = offering(CachedMemory(lambda: None))
    assert failures(right, "backend", "backend/cached memory") == []
    target = offering(CachedMemory(release), tensor=kept)
    found = message_of(target, "backend", "backend/cached memory")
    assert "a tensor that is in use has other contents" in found


def test_a_closed_runner_that_takes_the_memory_of_another_is_found():
    """Its release frees the caches of every runner."""
    caches = []

    def state(spec, limits):
        from inl.backend.simple import plain_state

        made = plain_state(spec, limits, tensor)
        caches.extend(made.caches)
        return made

    def release():
        for cache in caches:
            cache.k[...] = cache.v[...] = 0

    def in_place(k, v, cache, writes):
        at = np.divmod(writes, cache.k.shape[1])
        cache.k[at], cache.v[at] = k, v
        return cache

    def kernels():
        for op in catalog().values():
            if op.name == "write_kv":
                yield Kernel(op.name, "planted", in_place)
            elif not op.composite:
                yield Kernel(op.name, "planted", body_kernel(op, "float32"))

    target = offering(CachedMemory(release), state=state, kernels=kernels)
    found = message_of(target, "runner", "runner/two")
    assert "closing one must leave those of the other" in found


class OverTwo:
    """A backend over a mesh, of which only ``place`` and ``numpy`` are used."""

    numpy = staticmethod(wrap)

    def __init__(self, sizes, place):
        self.mesh = Mesh(sizes, place, 1, lambda pack: pack(0, None), lambda x: x)

    def offers(self, kind):
        return self.mesh if kind is Mesh and self.mesh.place else None


def over(place, most=2):
    def opened(placement):
        if placement.count > most:
            raise BackendUnavailable(f"mesh {placement}: found {most} devices")
        return OverTwo(placement, place)

    return opened


def first_half(host, axes, _first):
    values = tensor(host)
    for axis, name in enumerate(axes):
        if name is not None:
            values = np.take(values, range(values.shape[axis] // 2), axis)
    return values


@pytest.mark.parametrize(
    ("capability", "says"),
    [
        (Meshes(over(None)), "offers no Mesh"),
        (Meshes(over(None, most=1 << 20)), "accepted 9973 devices"),
        (Meshes(over(first_half)), "the values that come back are others"),
        (Meshes(lambda _: 1 // 0), "raised ZeroDivisionError"),
    ],
)
def test_a_wrong_mesh_is_named(capability, says):
    assert says in message_of(offering(capability), "runner", "runner/mesh")


def test_a_mesh_of_one_device_passes():
    target = offering(Meshes(over(first_half, most=1)))
    assert failures(target, "runner", "runner/mesh") == []
