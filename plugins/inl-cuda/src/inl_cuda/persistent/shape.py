"""Sizes of models whose step is one persistent kernel, and how it is launched."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from inl.spec.cache import Paged

DIM: Final = 64
"""Size of a head."""

RANKS: Final = 8
"""Blocks of a cluster."""

PAIRS: Final = 3 * DIM // 2 // RANKS
"""Pairs of rows of a head's queries, keys and values that a block multiplies."""

CLUSTERS: Final = (12, 16, 15, 14, 13, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
"""Numbers of clusters in the order in which they are tried. Measured on an H100 and an
H200: 12 rather than 16 for SmolLM2."""

BATCHES: Final = (4, 3, 2, 1)
"""Keys of 8 lanes that are copied into shared memory at once; the most that fit."""

TABLE: Final = 1024
"""Most entries of the block table for the keys of a block, in shared memory."""

MOST_LAYERS: Final = 62
"""Exchanges of a step have flags of their own."""

MOST_WARPS: Final = 32

SHARED: Final = 227 << 10
"""Shared memory of a block, in bytes."""

SPARE: Final = 512
"""Bytes of it for alignment."""


class Shape(NamedTuple):
    """Sizes of a model and of the blocks of its cache."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    page: int
    """Tokens of a block of the cache."""
    width: int
    """Columns of the block table."""


class Launch(NamedTuple):
    """Launch parameters."""

    clusters: int
    batch: int
    shared: int
    """Bytes of dynamic shared memory of a block."""

    @property
    def blocks(self) -> int:
        """Blocks of the grid, one for each multiprocessor."""
        return self.clusters * RANKS


def shape_of(config: Any, page: int, width: int) -> Shape:
    """Return the sizes of a model.

    page: tokens of a block of the cache. width: columns of the block table.
    """
    return Shape(
        config.hidden_size, config.layers, config.heads, config.kv_heads,
        config.intermediate_size, config.vocab_size, page, width,
    )  # fmt: skip


def refuse_config(model: Any, config: Any) -> str | None:
    """Return why the step of a model is not one kernel, ``None`` if it may be."""
    if model.computes != "llama":
        return "takes models of the Llama family"
    if config.dtype != "bfloat16":
        return f"takes bfloat16, found {config.dtype}"
    if config.activation != "silu":
        return f"takes silu, found {config.activation}"
    if config.head_dim != DIM:
        return f"takes heads of {DIM} elements, found {config.head_dim}"
    if any(view.window or view.group or not view.rotated for view in config.views):
        return "takes full attention of rotated heads"
    if config.qkv_bias or config.out_bias or config.mlp_bias or config.head_norm:
        return "takes no biases and no norms of heads"
    return None


def refuse_state(state: Any) -> str | None:
    """Return why the kernel does not take what a model stores between steps."""
    if [type(each) for each in state] != [Paged]:
        return "takes one cache of keys and values"
    if state[0].dtype != "bfloat16":
        return f"takes a cache in bfloat16, found {state[0].dtype}"
    return None


def plan_launch(shape: Shape, most_clusters: int) -> Launch | str:
    """Return launch parameters, or why the sizes do not fit.

    most_clusters: clusters that can be resident at the same time.
    """
    if shape.hidden % 64 or shape.vocab % 2 or shape.inner % 4:
        return f"takes rows of whole tiles, found {shape}"
    if shape.width // RANKS + 2 > TABLE:
        return f"takes {(TABLE - 2) * RANKS} blocks of a sequence, found {shape.width}"
    if shape.layers > MOST_LAYERS:
        return f"takes {MOST_LAYERS} layers at most, found {shape.layers}"
    if shape.heads > most_clusters:
        return f"takes {most_clusters} heads at most, found {shape.heads}"
    counts = [each for each in CLUSTERS if shape.heads <= each <= most_clusters]
    launches = [_launch(shape, each) for each in counts if _divides(shape, each)]
    fitting = [each for each in launches if each is not None]
    if not fitting:
        return "a layer does not fit the shared memory of the chip in equal parts"
    return fitting[0]


def _divides(shape: Shape, clusters: int) -> bool:
    """Whether blocks compute the same number of units, and have enough threads."""
    warps, rest = divmod(shape.inner, clusters * RANKS)
    fewest = max(PAIRS, shape.hidden // 64)
    return not rest and warps % 4 == 0 and fewest <= warps <= MOST_WARPS


def _launch(shape: Shape, clusters: int) -> Launch | None:
    row, units = 2 * shape.hidden, shape.inner // (clusters * RANKS)
    weights = 2 * PAIRS * row + shape.hidden // RANKS * DIM * 2 + 3 * units * row
    for batch in BATCHES:
        shared = weights + 4 * batch * units * DIM * 4
        if shared + fixed_bytes(shape, units, batch) <= SHARED:
            return Launch(clusters, batch, shared)
    return None


def fixed_bytes(shape: Shape, units: int, batch: int) -> int:
    """Return an upper bound of the static shared memory of a block."""
    numbers = (
        3 * shape.hidden,  # rows and sums
        shape.hidden // 4,  # squares
        3 * DIM + DIM,  # a head, and its result
        (RANKS + units) * (DIM + 4),  # parts of attention
        units + TABLE,  # activation, and block table
        4 * batch * units,  # places of keys
        8 * shape.layers,  # pointers
    )
    return 4 * sum(numbers) + SPARE


def options_of(shape: Shape, launch: Launch) -> dict[str, int]:
    """Return the constants of the kernel."""
    return {
        "HIDDEN": shape.hidden, "LAYERS": shape.layers, "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads, "INNER": shape.inner, "VOCAB": shape.vocab,
        "PAGE": shape.page, "CLUSTERS": launch.clusters, "BATCH": launch.batch,
        "TABLE": TABLE,
    }  # fmt: skip


def threads_of(shape: Shape, launch: Launch) -> int:
    """Return the threads of a block: a warp for each of its units."""
    return 32 * shape.inner // launch.blocks


def slot_words(shape: Shape, launch: Launch) -> int:
    """Return the words of 64 bits in which clusters exchange sums."""
    return 4 * launch.clusters * shape.hidden
