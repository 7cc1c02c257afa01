"""Cases of ops that a model's steps consist of: its sizes, weights and numbers.

The model runs on the bodies of its ops in float64, layers of each kind once, and the
arguments of every op are kept as a case; those of products are drawn in their size.
Weights are read as numbers. Those that a checkpoint stores as quantized blocks are also
checked in the layout that a kernel packs them in, in float32: in a narrower dtype the
numbers of most blocks would have to be rounded, which such a kernel does not do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.backend.reference import ReferenceBackend
from inl.checkpoints.blocks.dtypes import BLOCKS
from inl.device import Device, DeviceType
from inl.dtypes import HostArray
from inl.executor.model_loader import longest_context
from inl.executor.model_step import forward, sample
from inl.spec.cache import Paged, Slotted
from inl.spec.kernel import PLAIN
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.op import CATALOG, Case, OpSpec
from inl.spec.step import Bucket, Step
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves, tree_map
from inl.testing.check import Check, Measure
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from inl.weights.load import load_weights, read_shard, stored_specs
from inl.weights.plan import WeightPlan, plan_weights

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel
    from inl.testing.target import Target

EXACT: Final = "float64"
PACKED_DTYPE: Final = "float32"
BLOCK_SIZE: Final = 8
COLUMNS: Final = 32
"""Blocks of a sequence."""
PROMPTS: Final = (150, 21, 2)
"""Tokens of the prompts, more than a tile of 128 rows has."""
DRAFTS: Final = 4
SAMPLER: Final = "greedy"
COLLECTIVES: Final = ("all_reduce", "all_gather")
"""Ops that are the identity on one rank."""


class ModelCase(NamedTuple):
    """A call of an op in a step of a model."""

    op: OpSpec
    name: str
    """The step, and the number of such a call in it."""
    case: Case
    plan: WeightPlan | None = None
    """Of the weights of the call, if the model declares them for this op."""


def model_checks(target: Target) -> Iterator[Check]:
    """Check each op of a model's steps that differs in shapes; none without a model."""
    if target.model is None:
        return
    for index, found in enumerate(model_cases(target.model, target.seed)):
        if target.only and found.op.name not in target.only:
            continue
        name = f"model/{found.op.name}/{found.name}"
        check = functools.partial(_check, target, target.model, index)
        for dtype in target.dtypes:
            run = functools.partial(check, dtype)
            yield Check("model", f"{name}/{dtype}", run)
        packed = quantized(target.model, found.plan)
        if packed and PACKED_DTYPE in target.dtypes:
            op_call = OpCall(target, found.op, found.case, PACKED_DTYPE, packed)
            if op_call.layout != PLAIN:
                run = functools.partial(check, PACKED_DTYPE, is_packed=True)
                yield Check("model", f"{name}/{op_call.layout}/{PACKED_DTYPE}", run)


def quantized(language: LanguageModel, plan: WeightPlan | None) -> dict[str, HostArray]:
    """Return the parameters of a group that a checkpoint stores as blocks, by name."""
    arrays = {
        name: read_shard(language.checkpoint, plan, param, 0, EXACT, check=False)
        for name, param in (plan.group.params.items() if plan else ())
        if plan and plan.stored.get(name) in BLOCKS
    }
    return {
        name: HostArray(np.array(array.data), array.dtype, array.shape)
        for name, array in arrays.items()
        if array is not None and array.dtype in BLOCKS
    }


def _check(
    target: Target,
    language: LanguageModel,
    index: int,
    dtype: str,
    *,
    is_packed: bool = False,
) -> Measure:
    found = model_cases(language, target.seed)[index]
    packed = quantized(language, found.plan) if is_packed else {}
    op_call = OpCall(target, found.op, found.case, dtype, packed)
    note = f"; a call of {language.name}"
    if packed:
        dtypes = dict.fromkeys(array.dtype for array in packed.values())
        note += f", weights in {', '.join(dtypes)}"
    result = run_checked(op_call, target.seed, note)
    return require_passed(
        judged(op_call, found.case, result), op_call, target.seed, note
    )


@functools.lru_cache(maxsize=1)
def model_cases(language: LanguageModel, seed: int) -> list[ModelCase]:
    """Return the calls of a prompt's, a decoding and a verifying step of a model.

    Of calls whose shapes and attributes are the same the first is returned, each op
    before those that are composed of it. Raises
    :class:`~inl.errors.CheckpointError` for weights that cannot be read.
    """
    steps = _Steps(language, seed)
    found = [
        *steps.run("prompt", steps.prompts(),
                   Bucket(tokens=192, rows=4, sampler=SAMPLER), 0),
        *steps.run("decoding", [Row(slot, [-1], [0.5]) for slot in (1, 2, 3)],
                   Bucket(tokens=4, rows=4, sampler=SAMPLER), 3),
    ]  # fmt: skip
    if not any(isinstance(item, Slotted) for item in steps.spec):
        width = DRAFTS + 1
        bucket = Bucket(tokens=2 * width, rows=2, tokens_per_row=width, sampler=SAMPLER)
        rows = steps.half_right(bucket)
        found += steps.run("verifying", rows, bucket, 0)
    return found


class _Steps:
    """Steps of a model in float64, on the layers of each kind."""

    def __init__(self, language: LanguageModel, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 7])
        backend = ReferenceBackend(Device(DeviceType.CPU), dtype=EXACT)
        self._model = model = language.model
        self._config = config = replace(language.config, dtype=EXACT)
        tree = model.weights(config)
        self.spec = model.state(config)
        self._context = longest_context(language)
        self._kept = _kinds(tree.layers, self.spec)
        tree = tree._replace(layers=tuple(tree.layers[index] for index in self._kept))
        stored = stored_specs(language.checkpoint)
        plan = plan_weights(tree, (), stored)
        self._weights = load_weights(plan, language.checkpoint, backend, EXACT)
        self._plans = {id(w): each for each, w in _groups(plan, self._weights)}
        """Plan of each group of weights, by the identity of its tuple."""
        self._vocab = self._weights_vocab()
        paged = [item for item in self.spec if isinstance(item, Paged)]
        self._groups = len(paged)
        self._limits = Limits(
            slots=4, blocks=(3 * COLUMNS + 1,) * len(paged), block_size=BLOCK_SIZE,
            max_blocks_per_seq=COLUMNS, vocab=self._vocab, sampler=SAMPLER,
        )  # fmt: skip
        self._state = backend.state(self.spec, limits=self._limits)
        self._seen: set[Any] = set()
        self._number = 0

    def _weights_vocab(self) -> int:
        return self._model.vocab_size or max(
            leaf.shape[0] for leaf in leaves(self._weights) if leaf.ndim > 1
        )

    def ids(self, count: int) -> list[int]:
        """Return random tokens; the last of the vocabulary is among them."""
        found = self._rng.integers(0, self._vocab, count)
        found[0] = self._vocab - 1
        return [int(each) for each in found]

    def prompts(self) -> list[Row]:
        """Return rows of random prompts, whose sequences it admits."""
        rows, first = [], 1
        ops = _Recorder(Bucket(tokens=1, rows=1), None)
        for slot, wanted in enumerate(PROMPTS, 1):
            count = min(wanted, self._context - DRAFTS - 2)
            blocks = [list(range(first, first + COLUMNS))] * self._groups
            first += COLUMNS
            frame = admit_frame(
                slot, blocks, groups=self._groups, max_blocks_per_seq=COLUMNS
            )
            tables = ops.admit(frame[None], self._state.tables)
            self._state = self._state._replace(tables=tables)
            rows.append(Row(slot, self.ids(count), [0.5]))
        return rows

    def run(
        self, label: str, rows: list[Row], bucket: Bucket, decode_rows: int
    ) -> list[ModelCase]:
        """Compute a step and return its calls that were not seen before."""
        found: list[ModelCase] = []
        ops = _Recorder(bucket, functools.partial(self._keep, found, label))
        _, self._state = self._step(ops, rows, bucket, decode_rows)
        self._number += 1
        return found

    def half_right(self, bucket: Bucket) -> list[Row]:
        """Return two rows with drafts: predicted ones, and random ones."""
        width = bucket.tokens_per_row
        drafts, others = (self.ids(width) for _ in range(2))
        for index in range(1, width):
            rows = [Row(slot, ids, [0.5] * width) for slot, ids in
                    ((1, drafts), (3, others))]  # fmt: skip
            tokens, _ = self._step(_Recorder(bucket, None), rows, bucket, 0)
            drafts[index] = int(tokens[index - 1])
        return rows

    def _step(
        self, ops: Any, rows: list[Row], bucket: Bucket, decode_rows: int
    ) -> tuple[Any, Any]:
        message = step_frame(
            bucket, rows, step=self._number, groups=self._groups,
            block_size=BLOCK_SIZE, decode_rows=decode_rows,
        )  # fmt: skip
        model = replace(self._model, layer=_renumbered(self._model.layer, self._kept))
        logits, step, state = forward(
            ops, model, self._config, self._weights, message, self._state
        )
        return sample(ops, logits, step, state)

    def _keep(
        self, found: list[ModelCase], label: str, op: OpSpec, args: Any, attrs: Any
    ) -> None:
        specs = tree_map(lambda x: StrictArray(np.shape(x), _dtype(x)), args)
        key = op.name, repr(specs), repr(sorted(attrs.items()))
        if key in self._seen:
            return
        self._seen.add(key)
        plans = [self._plans[id(x)] for x in args if id(x) in self._plans]
        plan = next((each for each in plans if each.group.op == op.name), None)
        if op.weights is not None:
            args = tuple(map(self._drawn, args))
        number = sum(each.op is op for each in found)
        name = f"{label} {number + 1}" if number else label
        case = Case(name, tree_map(np.array, args), dict(attrs))
        found.append(ModelCase(op, name, case, plan))

    def _drawn(self, x: Any) -> Any:
        """Return random numbers in place of the rows of an operand of products.

        Rows keep their size. A sum of a model's own numbers may be far smaller than its
        terms; the error of a right kernel is then large beside the sum.
        """
        if not isinstance(x, np.ndarray) or x.dtype != EXACT or x.ndim < 2:
            return x
        size = np.sqrt((x * x).mean(-1, keepdims=True))
        return size * self._rng.standard_normal(x.shape)


def _renumbered(layer: Callable[..., Any], kept: tuple[int, ...]) -> Callable[..., Any]:
    """Return a model's function that gets the numbers of layers that are left out."""

    @functools.wraps(layer)
    def run(*args: Any, index: int, **options: Any) -> Any:
        return layer(*args, index=kept[index], **options)

    return run


def _groups(plan: Any, weights: Any) -> Iterator[tuple[WeightPlan, Any]]:
    """Yield the plan and the weights of each group of two parallel trees."""
    if isinstance(plan, WeightPlan):
        yield plan, weights
    elif isinstance(plan, Mapping):
        for key in plan:
            yield from _groups(plan[key], weights[key])
    elif isinstance(plan, (tuple, list)):
        for one, other in zip(plan, weights, strict=True):
            yield from _groups(one, other)


def _kinds(layers: Any, spec: Any) -> tuple[int, ...]:
    """Return the first layer of each kind, and the last, which may be pruned."""
    groups = {
        index: number
        for number, item in enumerate(spec)
        if isinstance(item, Paged)
        for index in item.layers
    }
    first: dict[Any, int] = {}
    for index, layer in enumerate(layers):
        shapes = tuple(
            (group.op, tuple((key, param.shape) for key, param in group.params.items()))
            for group in leaves(layer)
        )
        first.setdefault((groups.get(index), shapes), index)
    return tuple(sorted({*first.values(), len(layers) - 1}))


def _dtype(x: Any) -> str:
    return str(np.asarray(x).dtype.name)


class _Recorder:
    """The bodies of ops, whose calls are given to ``keep``."""

    def __init__(
        self, bucket: Bucket, keep: Callable[[OpSpec, Any, Any], None] | None
    ) -> None:
        self.bucket, self.block_size = bucket, BLOCK_SIZE
        self._keep = keep

    def plan(self, _step: Step, **_: Any) -> tuple[()]:
        """Return an empty plan: bodies do not read it."""
        return ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name not in CATALOG:
            raise AttributeError(name)
        spec = CATALOG[name]

        def run(*args: Any, **attrs: Any) -> Any:
            given = tree_map(np.array, args) if spec.consumes else args
            if spec.composite:
                result = spec.body(self, *args, **attrs)
            else:
                result = spec.body(*args, **attrs)
            if self._keep is not None and name not in COLLECTIVES:
                self._keep(spec, given, attrs)
            return result

        return run
