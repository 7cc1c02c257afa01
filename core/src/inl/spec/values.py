"""The values that cross the seam: what a step computes and what a model is.

A tensor is opaque here (``Array``): NumPy, torch, JAX or a :class:`StrictArray`.
Every tuple is a plain ``NamedTuple``, so each framework sees a tree of arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from inl.dtypes import SIZES

Array = Any
"""An opaque tensor: ``+ - *``, ``.shape``, ``.dtype``, static slices and reshapes."""

SAMPLERS = ("greedy", "draw", "full")
"""Ways to choose a token, by rising cost; a bucket is compiled for one."""

PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Columns of ``Tables.params``; "greedy" reads none, "draw" the first."""

NEUTRAL = (0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
"""Values of :data:`PARAMS` that change nothing."""

TOKEN_BUDGET = 512
"""Tokens of a step where neither an engine nor its backend has a preference."""

TOP = 20
"""Likeliest tokens whose log-probabilities a "full" step reports."""


class Bucket(NamedTuple):
    """Static shape of a compiled step. Hashable; the only compile key."""

    tokens: int
    """T: tokens computed in the step, padding included."""
    rows: int
    """R: sequences taking part, padding included."""
    width: int = 1
    """W: tokens sampled per row; 1, or k + 1 when k drafts are verified."""
    sampler: str = "greedy"
    """One of :data:`SAMPLERS`."""


class Step(NamedTuple):
    """What one step computes: int32 arrays on the device.

    Decoding rows come first. Slot 0, block 0 and cell 0 belong to nobody: padding
    reads and writes there. ``G`` cache groups, ``B`` blocks per sequence,
    ``S = R * W`` samples.
    """

    tokens: Array
    """[T] token ids."""
    positions: Array
    """[T] place of the token in its own sequence."""
    rows: Array
    """[T] row of the token."""
    starts: Array
    """[R + 1] row r owns tokens starts[r] .. starts[r + 1]."""
    lengths: Array
    """[R] tokens cached after this step; 0 for padding."""
    slots: Array
    """[R] home of the row in per-sequence state."""
    blocks: Array
    """[G, R, B] block table of each cache group."""
    writes: Array
    """[G, T] cell (block * block_size + offset) for the token's key and value."""
    samples: Array
    """[S] tokens whose hidden state becomes logits."""
    adapters: Array
    """[R] adapter of the row; 0 is none."""
    counts: Array
    """[3] decoding rows, rows, tokens in use."""
    uniforms: Array
    """[S] the host's uniform numbers, float32 bits held as int32."""
    plan: Any = ()
    """What the attention kernel worked out once for all layers; opaque."""


class Tables(NamedTuple):
    """Per-slot bookkeeping that lives at the runner, int32 unless said otherwise."""

    blocks: Array
    """[G, slots, B] block tables."""
    lengths: Array
    """[slots] tokens cached."""
    last: Array
    """[slots] last token chosen."""
    adapters: Array
    """[slots] adapter; 0 is none."""
    params: Array
    """[slots, len(PARAMS)] float32 sampling parameters."""
    counts: Array
    """[slots, V] twice the times that the answer holds a token, plus 1 where the prompt
    does; [slots, 0] where no "full" program is served."""
    bias: Array
    """[slots, V] or [slots, 0], float32: added to the logits."""


class Scores(NamedTuple):
    """Log-probabilities of a step's choices; N = min(TOP, V)."""

    chosen: Array
    """[S] float32, of the chosen tokens."""
    ids: Array
    """[S, N] the likeliest tokens, likeliest first."""
    values: Array
    """[S, N] float32, theirs."""


class Cache(NamedTuple):
    """The default layout of one layer's paged cache; a backend may have its own."""

    k: Array
    """[blocks, block_size, kv_heads, head_dim]."""
    v: Array
    """[blocks, block_size, kv_heads, head_dim]."""


class State(NamedTuple):
    """All that a step consumes and returns; its layout is the backend's affair."""

    caches: tuple[Any, ...]
    """One opaque cache per attention layer."""
    slotted: Mapping[str, Array]
    """Name -> [slots, ...]: per-sequence state other than keys and values."""
    tables: Tables


class Paged(NamedTuple):
    """One cache group: layers whose keys and values share a block table."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    """int8 has a float32 scale for each token and head, laid out by the backend."""
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        scale = SIZES["float32"] if self.dtype == "int8" else 0
        return 2 * self.kv_heads * (self.head_dim * SIZES[self.dtype] + scale)


class Slotted(NamedTuple):
    """State of fixed size per sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rebuild: Literal["tokens", "replay", "save"]
    """"tokens": recomputing restores it; "replay": one by one; "save": only a copy."""


class Cut(NamedTuple):
    """Rows of a stored tensor that make a logical one."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) along axis 0; what they hold is put together in this order."""
    rows: int
    """Rows of the stored tensor."""


class Part(NamedTuple):
    """One of several tensors of one size that a checkpoint stores as one."""

    axis: int
    """Axis of the stored tensor along which they follow one another; not 0."""
    place: int
    """Which of them, from 0."""
    total: int
    """How many there are."""


class Param(NamedTuple):
    """One logical tensor of a checkpoint."""

    source: str
    """Its name in the Hugging Face layout."""
    shape: tuple[int, ...]
    axis: int | None = None
    """Axis cut over tensor-parallel ranks; ``None`` is a copy on each."""
    optional: bool = False
    """May be absent; then the group's field is ``None``."""
    cut: Cut | None = None
    """The part of the stored tensor that this is, where that holds more or another
    order; ``None`` is all of it."""
    offset: float = 0.0
    """Added to every number, before it is rounded to the compute dtype."""
    stack: int = 0
    """Stored tensors that make up axis 0, one each: ``{}`` in ``source`` stands for
    their numbers, from 0. 0 is one tensor as it is."""
    part: Part | None = None
    """Which part of the stored tensor this is; ``None`` is all of it."""
    others: tuple[Param, ...] = ()
    """The same tensor as other files have it: the first of which the checkpoint has
    anything is taken."""
    finite: bool = False
    """Whether NaN and infinity are refused when it is loaded: for small tensors."""


@dataclass(frozen=True, slots=True, init=False)
class Group:
    """Parameters that one op takes together, so that a kernel may pack them."""

    op: str
    params: Mapping[str, Param]

    def __init__(self, op: str, **params: Param) -> None:
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "params", params)


def passed_blocks(window: int | None, position: int, block_size: int) -> int:
    """Leading blocks of a sequence that no query from ``position`` on sees."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


@dataclass(frozen=True, slots=True)
class Limits:
    """What a runner can hold. Slot 0 and block 0 belong to nobody and are counted."""

    slots: int
    """Sequences at once, plus one."""
    blocks: tuple[int, ...]
    """Blocks of each cache group, plus one each."""
    block_size: int
    """Tokens per block."""
    width: int
    """B: most blocks of one sequence, so ``width * block_size`` tokens at most."""
    vocab: int
    """V: tokens are 0 .. vocab - 1."""
    buckets: tuple[Bucket, ...] = ()
    """Programs that exist, smallest first; empty where every size is served exactly."""
    depth: int = 2
    """Steps that may be in flight."""
    sampler: str = SAMPLERS[-1]
    """The costliest of :data:`SAMPLERS` that is served. "full" holds two tables of
    [slots, V] that the others do not need."""

    windows: tuple[int | None, ...] = ()
    """Tokens that a query of each cache group sees, ``None`` for all; empty is all.
    Where there is a window, blocks that lie before it may be block 0 in a table."""
    token_budget: int = TOKEN_BUDGET
    """Most tokens of a step that a scheduler plans unless it is told otherwise."""

    @property
    def samplers(self) -> tuple[str, ...]:
        """Those of :data:`SAMPLERS` that are served."""
        return SAMPLERS[: SAMPLERS.index(self.sampler) + 1]

    @property
    def counted(self) -> int:
        """Columns of the tables that only "full" needs: V or 0."""
        return self.vocab if self.sampler == "full" else 0

    @property
    def groups(self) -> int:
        """G: cache groups."""
        return len(self.blocks)

    def before_window(self, group: int, position: int) -> int:
        """Blocks of a sequence that no query from ``position`` on sees in a group."""
        window = self.windows[group] if self.windows else None
        return passed_blocks(window, position, self.block_size)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that fits."""
        return min(self.width, *(count - 1 for count in self.blocks)) * self.block_size


def as_it_is(config: Any, checkpoint: Any) -> tuple[Any, Any]:
    """Read a checkpoint under the names that it has."""
    return config, checkpoint


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture: what to load, what it remembers, and three pure functions.

    The core owns the loop over layers. Each function is written per shard: counts
    come from shapes, per-head sizes from the config.
    """

    config: Callable[[Mapping[str, Any]], Any]
    """(hf config dict) -> frozen, hashable config."""
    weights: Callable[[Any], Any]
    """(config) -> NamedTuple with a ``layers`` tuple; its leaves are :class:`Group`."""
    state: Callable[[Any], tuple[Paged | Slotted, ...]]
    """(config) -> what a sequence leaves behind."""
    embed: Callable[..., tuple[Array, ...]]
    """(ops, config, w, step) -> carry: tuple of [T, ...]."""
    layer: Callable[..., tuple[tuple[Array, ...], State]]
    """(ops, config, w, carry, step, state, *, index) -> (carry, state).

    One with a parameter ``sampled=None`` is given, as the last layer of a step with
    more tokens than rows, the step of the sampled tokens alone: it caches keys and
    values of all tokens, and its carry is [R, ...], of those that are sampled.
    """
    head: Callable[..., Array]
    """(ops, config, w, carry, step) -> logits [S, V]."""
    adapt: Callable[[Any, Any], tuple[Any, Any]] = as_it_is
    """(config, checkpoint) -> both as ``weights`` has them: for older layouts."""

    @property
    def narrows(self) -> bool:
        """Whether the last layer can compute the sampled tokens alone."""
        return "sampled" in inspect.signature(self.layer).parameters
