"""Checks of what is prepared or kept: programs, packed weights, memory, and meshes."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.backend.base import CachedMemory, Precompiler
from inl.backend.weight_cache import FileIdentity, WeightCache
from inl.dtypes import rounded, widen, wrap
from inl.errors import BackendUnavailable, message
from inl.ops import catalog
from inl.ops.linear import Linear
from inl.placement.mesh import TENSOR, Mesh, Meshes
from inl.placement.placement import Placement
from inl.progress import ProgressReporter
from inl.spec.message import POOLED
from inl.spec.op import Case
from inl.spec.step import Bucket
from inl.testing.check import CheckFailed, Measure, equal, require, worst
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged
from inl.testing.oracle import Tiny, prompt_logits
from inl.testing.play import admission, most_tokens, one_step
from inl.testing.runner_frames import first_blocks, some_ids
from inl.testing.step_checks import FailingStep, failing_runner

if TYPE_CHECKING:
    from inl.runners.local_runner import LocalRunner
    from inl.testing.target import Target

MODEL_BYTES: Final = 24 << 20
"""Size of the file of a model, of which most is a hole: caches leave out small ones."""
SHAPE: Final = (48, 64)
MOST: Final = 9973
"""Devices that no mesh has."""
SECONDS: Final = 60.0
"""Time for a thread that a load has started."""


def programs(tiny: Tiny) -> Measure:
    """Programs of one bucket, and of two models, are each that of its own function."""
    other = Tiny(tiny.target, tiny.dtype)
    other.hf = {**other.hf, "rope_theta": 50.0, "rms_norm_eps": 0.3}
    advice = (
        "a program must be that of the function that `compile` got: look for a cache "
        "of programs whose key is the bucket or the name alone"
    )
    measures = []
    for which, model in (("one", tiny), ("another", other)):
        ids = some_ids(tiny, 6, "programs")
        runner = model.runner()
        try:
            ids = ids[: most_tokens(runner.limits, 6)]
            found = prompt_logits(runner, ids)
            frame = one_step(
                runner.limits, [(1, ids)], step=2, decoding=0, flags=POOLED
            )
            runner.submit(admission(runner.limits, 1, first_blocks(runner, 16)))
            runner.submit(frame)
            hidden = runner.collect().hidden
        except Exception as error:
            raise CheckFailed(
                f"the programs logits and pooled of {which} of two models raised "
                f"{type(error).__name__}: {message(error)}; {advice}"
            ) from error
        finally:
            runner.close()
        require(hidden is not None, f"the program pooled returned no states; {advice}")
        expected = model.logits(ids)[-1]
        error_size = float(np.abs(found - expected).max())
        bound = 4 * model.expected_error(ids) + 1e-6 * float(np.abs(expected).max())
        measures.append(Measure(error_size, bound))
        require(
            error_size <= bound,
            f"logits of {which} of two models whose configs differ: error "
            f"{error_size:.3g} > {bound:.3g}; {advice}",
            measures[-1],
        )
    return worst(measures)


def precompiled(tiny: Tiny) -> Measure | None:
    """Programs that are compiled ahead compute what others do; errors are not raised.

    Nothing without :class:`~inl.backend.base.Precompiler`.
    """
    if tiny.target.backend.offers(Precompiler) is None:
        return None
    failing = FailingStep()
    with failing_runner(tiny, failing) as runner:
        failing.is_set = True
        try:
            runner.executor.precompile(_some_buckets(runner))
        except Exception as error:
            raise CheckFailed(
                "Precompiler.precompile: a call raised, and so did precompile, "
                f"{type(error).__name__}: {message(error)}; an error recurs in the "
                "real step"
            ) from error
    prompt, answer = some_ids(tiny, 6, "precompiled"), []
    runner = tiny.runner()
    try:
        prompt = prompt[: most_tokens(runner.limits, 6)]
        runner.submit(admission(runner.limits, 1, first_blocks(runner, 32)))
        for step in range(1, 9):
            if step in (1, 4):
                runner.executor.precompile(_some_buckets(runner, step))
            tokens = prompt if step == 1 else [-1]
            frame = one_step(
                runner.limits, [(1, tokens)], step=step, decoding=int(step > 1)
            )
            runner.submit(frame)
            answer.append(int(runner.collect().tokens[0, 0]))
    finally:
        runner.close()
    try:
        return tiny.judge(prompt, answer)
    except CheckFailed as error:
        raise CheckFailed(
            f"after Precompiler.precompile in the middle of a sequence: {error}",
            error.measure,
        ) from error


def _some_buckets(runner: LocalRunner, rows: int = 2) -> list[Bucket]:
    """Return buckets that the runner has, or could have where it serves every size."""
    own = [bucket for bucket in runner.limits.buckets if bucket.repeat == 1]
    more = [Bucket(tokens=rows, rows=rows), Bucket(tokens=rows + 5, rows=1)]
    return own[:2] or more


def cached_memory(target: Target, offered: CachedMemory) -> None:
    """Release leaves tensors that are in use as they are, and may be called again."""
    backend, rng = target.backend, target.rng("released")
    values = rng.integers(-99, 99, (3, 65, 257)).astype(np.int32)
    kept = [backend.tensor(wrap(part)) for part in values]
    for _ in range(2):
        dropped = [backend.tensor(wrap(values[0] + shift)) for shift in range(8)]
        del dropped
        try:
            offered.release()
        except Exception as error:
            raise CheckFailed(
                f"CachedMemory.release raised {type(error).__name__}: "
                f"{message(error)}; it frees what no tensor uses, if anything"
            ) from error
        fresh = backend.tensor(wrap(values[1] + 7))
        for found, wanted in zip((*kept, fresh), (*values, values[1] + 7), strict=True):
            require(
                np.array_equal(widen(backend.numpy(found)), wanted),
                "CachedMemory.release: a tensor that is in use has other contents "
                "afterwards; free what no tensor uses",
            )


class _Model:
    """A model of one matrix in a file, and its weights as a cache loads them."""

    def __init__(self, target: Target, cache: WeightCache, path: Path) -> None:
        self.target, self.cache, self.path = target, cache, path

    def save(self, number: int) -> None:
        """Write other contents of the same size, by another file."""
        other = self.path.with_suffix(".new")
        with other.open("wb") as file:
            file.truncate(MODEL_BYTES)
            file.write(b"model %d" % number)
        other.replace(self.path)

    def identities(self) -> dict[Path, FileIdentity | None]:
        return {self.path: FileIdentity.of(self.path.stat())}

    def loads(
        self, number: int, what: str, files: Any = None, dtype: str = "", **options: str
    ) -> None:
        """Load a model's matrix ``number`` through the cache, and require that one."""
        target = self.target
        dtype = dtype or target.dtypes[0]
        op_call = self._call(number, dtype)
        ops = op_call.ops()
        before = threading.enumerate()
        args = self.cache.load(
            files or self.identities(), dtype, lambda: op_call.arguments(ops),
            ProgressReporter(), **options,
        )  # fmt: skip
        for thread in threading.enumerate():
            if thread not in before:  # the cache may still be written
                thread.join(SECONDS)
        verdict = judged(
            op_call, op_call.case, op_call.fetch(op_call.result(ops, args))
        )
        require(
            verdict.passed,
            f"WeightCache.load in {dtype} {what}: a product with the weights that it "
            f"returned is wrong: {verdict}",
        )

    def _call(self, number: int, dtype: str) -> OpCall:
        rng = self.target.rng("weight cache", number)
        x, w = rng.standard_normal((3, SHAPE[1])), Linear(rng.standard_normal(SHAPE))
        case = Case(f"weights {number}", (x, w))
        return OpCall(self.target, catalog()["linear"], case, dtype)


def weight_cache(target: Target, cache: WeightCache) -> None:
    """Weights that a cache returns are those of the files, the dtype and the variant.

    A file that was changed, or is changed after it was opened, is packed again.
    """
    with tempfile.TemporaryDirectory() as folder, _cache_in(Path(folder, "cache")):
        model = _Model(target, cache, Path(folder, "model.safetensors"))
        model.save(1)
        model.loads(1, "for the first time")
        model.loads(1, "for the second time")
        model.loads(2, "as another variant", variant="other")
        model.loads(1, "after another variant")
        model.save(3)
        model.loads(3, "after the file was changed")
        opened_as = model.identities()
        model.save(4)
        model.loads(3, "of a file that was changed after it was opened", opened_as)
        model.loads(4, "after a load of a file that was changed since")
        for number, dtype in enumerate(target.dtypes[1:], 5):
            model.loads(number, "beside another dtype", dtype=dtype)
        _passes_errors_on(model)
        model.loads(4, "after a load that raised")


def _passes_errors_on(model: _Model) -> None:
    def load() -> Any:
        raise ValueError("inl check: the weights cannot be read")

    model.save(4)
    try:
        model.cache.load(
            model.identities(), model.target.dtypes[0], load, ProgressReporter()
        )
    except ValueError:
        return
    raise CheckFailed(
        "WeightCache.load: the packing raised ValueError, and load did not"
    )


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Let caches write to a folder of the check's own."""
    before = os.environ.get("INL_CACHE")
    folder.mkdir(mode=0o700)
    os.environ["INL_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["INL_CACHE"]
        else:
            os.environ["INL_CACHE"] = before


def meshes(tiny: Tiny) -> Measure | None:
    """A mesh of two devices computes a tiny Llama; one of too many is refused.

    Nothing without :class:`~inl.placement.mesh.Meshes`; without a second device only
    the refusal.
    """
    backend = tiny.target.backend
    offered = backend.offers(Meshes)
    if offered is None:
        return None
    _refuses_too_many(offered)
    if TENSOR not in offered.axes:
        return None
    try:
        over = offered.over(Placement(tensor=2))
    except BackendUnavailable:
        return None
    mesh = over.offers(Mesh)
    if mesh is None:
        raise CheckFailed("Meshes.over: the backend that it returned offers no Mesh")
    equal("Mesh.sizes along the tensor axis", mesh.sizes.tensor, 2)
    _places(tiny, over, mesh)
    target = replace(tiny.target)
    vars(target)["backend"] = over
    runner = Tiny(target, tiny.dtype).runner()
    try:
        ids = some_ids(tiny, most_tokens(runner.limits, 21), "mesh")
        found = prompt_logits(runner, ids)
    finally:
        runner.close()
    expected = tiny.logits(ids)[-1]
    error = float(np.abs(found - expected).max())
    bound = 4 * tiny.expected_error(ids) + 1e-6 * float(np.abs(expected).max())
    measure = Measure(error, bound)
    require(
        measure.ratio <= 1,
        f"logits of a tiny Llama over a mesh of 2 devices in {tiny.dtype}: error "
        f"{error:.3g} > {bound:.3g}; its kernels must reduce over the tensor axis; "
        f"seed {tiny.target.seed}",
        measure,
    )
    return measure


def _refuses_too_many(offered: Meshes) -> None:
    try:
        offered.over(Placement(tensor=MOST))
    except BackendUnavailable:
        return
    except Exception as error:
        raise CheckFailed(
            f"Meshes.over of {MOST} devices raised {type(error).__name__}: "
            f"{message(error)}; expected BackendUnavailable"
        ) from error
    raise CheckFailed(f"Meshes.over: accepted {MOST} devices")


def _places(tiny: Tiny, over: Any, mesh: Mesh) -> None:
    """An array that is divided, or whole on each device, comes back as it was."""
    rng = tiny.target.rng("mesh")
    values = rounded(rng.standard_normal((6, 8)), "float32").astype(np.float32)
    axes: tuple[tuple[str | None, ...], ...]
    axes = (None, None), (TENSOR, None), (None, TENSOR)
    for divided in axes:
        found = widen(over.numpy(mesh.place(wrap(values), divided, False)))
        require(
            np.array_equal(found, values),
            f"Mesh.place of an array divided as {divided}: the values that come back "
            "are others",
        )


CAPABILITIES: Final[dict[str, tuple[Any, Callable[[Target, Any], None]]]] = {
    "cached memory": (CachedMemory, cached_memory),
    "weight cache": (WeightCache, weight_cache),
}
"""Name of a check of a backend -> capability, and the check."""
