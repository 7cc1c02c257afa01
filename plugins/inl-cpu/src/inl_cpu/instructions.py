"""The instruction table: every native instruction, its operands and flags.

This is the only list of operands. ``generate_instructions.py`` writes
``native/runtime/instructions.h`` from it (opcodes, flags, typed accessors, checks); in
Python the classes are what kernels emit. To add an instruction, edit four files:

1. this one, then run ``python generate_instructions.py``;
2. the C++ kernel, in ``native/kernels/``;
3. ``native/kernels/table.h``, which maps opcodes to kernels;
4. the Python kernel that emits it, in ``inl_cpu/kernels/``.

Tensors are float32, row-major and contiguous in the last axis unless stated otherwise;
integers are int32. Strides count elements from one row to the next. "In place" means
that an output may be the same buffer as an input.
"""

# Annotations are evaluated with the classes: as text each would be compiled at a start.
from enum import IntEnum

from inl_cpu.abi import Flag
from inl_cpu.encoding import (
    INSTRUCTIONS,
    D,
    Dim,
    Instruction,
    ReadBytes,
    ReadF32,
    ReadF64,
    ReadI32,
    ReadMatrix,
    ReadU32,
    Real,
    UpdateBytes,
    UpdateF32,
    UpdateI32,
    UpdateMatrix,
    WriteF32,
    WriteI32,
    WriteU64,
)

KV = Flag.KV_BF16 | Flag.KV_INT8 | Flag.KV_FLOAT8


class Zero(Instruction[D], opcode=0):
    """y = 0."""

    count: Dim
    y: WriteF32[D]


class Copy(Instruction[D], opcode=1):
    """y = x, row by row."""

    rows: Dim
    width: Dim
    x_stride: Dim
    y_stride: Dim
    x: ReadF32[D]
    y: WriteF32[D]


class Add(Instruction[D], opcode=2):
    """y = a + b; in place."""

    count: Dim
    a: ReadF32[D]
    b: ReadF32[D]
    y: WriteF32[D]


class Sub(Instruction[D], opcode=3):
    """y = a - b; in place."""

    count: Dim
    a: ReadF32[D]
    b: ReadF32[D]
    y: WriteF32[D]


class Mul(Instruction[D], opcode=4):
    """y = a * b; in place."""

    count: Dim
    a: ReadF32[D]
    b: ReadF32[D]
    y: WriteF32[D]


class Scale(Instruction[D], opcode=5):
    """y = factor * x + offset; in place."""

    count: Dim
    x: ReadF32[D]
    y: WriteF32[D]
    factor: Real
    offset: Real = 0.0


class Embedding(Instruction[D], opcode=6):
    """y[t] = factor * row ids[t] of the matrix; zeros for an id out of range."""

    tokens: Dim
    y_stride: Dim
    ids: ReadI32[D]
    matrix: ReadMatrix[D]
    y: WriteF32[D]
    factor: Real = 1.0


class RmsNorm(Instruction[D], opcode=7, flags=Flag.PLUS_ONE):
    """y = x / sqrt(mean(x^2) + eps) * weight over each head of a row; in place."""

    rows: Dim
    heads: Dim
    head_width: Dim
    x_stride: Dim
    y_stride: Dim
    x: ReadF32[D]
    weight: ReadF32[D] | None = None
    y: WriteF32[D]
    eps: Real


class AddNorm(Instruction[D], opcode=8, flags=Flag.PLUS_ONE):
    """sum = residual + delta; y = RMS norm of sum. sum may be residual or delta."""

    rows: Dim
    width: Dim
    residual: ReadF32[D]
    delta: ReadF32[D]
    weight: ReadF32[D]
    sum: WriteF32[D]
    y: WriteF32[D]
    eps: Real


class Linear(
    Instruction[D],
    opcode=9,
    flags=(
        Flag.X_MASK
        | Flag.GATE_SILU
        | Flag.GATE_GELU
        | Flag.PLUS_ONE
        | Flag.BATCH_VARIANT
        | Flag.REQUANTIZE
    ),
):
    """y [rows, matrix.rows] = x [rows, matrix.columns] times the transpose, plus bias.

    Flags: the precision of x (X_*); an activation (GATE_*), for which the matrix holds
    16 rows of gate and 16 of up in turn, y has gated_columns columns and there is no
    bias; PLUS_ONE; REQUANTIZE. With norm_weight, x is RMS-normalized first, after delta
    is added if present; sum then gets x + delta and must be neither x nor delta.
    x_stride applies to delta and sum too.
    """

    rows: Dim
    x_stride: Dim
    y_stride: Dim
    gated_columns: Dim = 0
    x: ReadF32[D]
    matrix: ReadMatrix[D]
    bias: ReadF32[D] | None = None
    y: WriteF32[D]
    delta: ReadF32[D] | None = None
    norm_weight: ReadF32[D] | None = None
    sum: WriteF32[D] | None = None
    eps: Real = 0.0


class Gated(Instruction[D], opcode=10, flags=Flag.GATE_SILU | Flag.GATE_GELU):
    """y = activation(gate) * up; in place. Takes one GATE_* flag."""

    rows: Dim
    width: Dim
    gate_stride: Dim
    up_stride: Dim
    y_stride: Dim
    gate: ReadF32[D]
    up: ReadF32[D]
    y: WriteF32[D]


class Rope(Instruction[D], opcode=11):
    """Rotate the halves of each head; in place. cos and sin: [rows, head_width / 2]."""

    rows: Dim
    heads: Dim
    head_width: Dim
    x_stride: Dim
    y_stride: Dim
    x: ReadF32[D]
    cos: ReadF32[D]
    sin: ReadF32[D]
    y: WriteF32[D]


class RopeTable(Instruction[D], opcode=12):
    """cos and sin [tokens, pairs] of position * rate; rates [pairs].

    The first scaled_pairs columns are multiplied by factor.
    """

    tokens: Dim
    pairs: Dim
    scaled_pairs: Dim
    positions: ReadI32[D]
    rates: ReadF64[D]
    cos: WriteF32[D]
    sin: WriteF32[D]
    factor: Real


class Attention(
    Instruction[D],
    opcode=13,
    flags=KV | Flag.PLUS_ONE | Flag.BATCH_VARIANT | Flag.ONE_TOKEN_ROWS,
):
    """Causal attention over the paged cache.

    If the operands are present, k and v are first written to the cache, after the heads
    of q and k are normalized (q_norm, k_norm) and rotated (cos, sin). A token at
    position p attends to keys of its row at positions p - window + 1 .. p; a window of
    0 is unlimited. Tokens from starts[rows] on and rows of length 0 get zeros. Weights
    are softmax(cap * tanh(scale * q k / cap)); a cap of 0 is none. sinks [heads] are
    logits that take part in the softmax and contribute no value. scales [2] are those
    of keys and values of a cache in float8; None is 1. first_keys [tokens] are the
    first keys of the tokens' windows; None are those of window. positions, token_rows,
    starts, lengths and first_keys are also read before the program runs, to divide the
    work.

    Shapes: y [tokens, heads * head_width], positions and token_rows [tokens],
    starts [rows + 1], lengths [rows], and of one cache group blocks [rows, table_width]
    and writes [tokens].
    """

    tokens: Dim
    heads: Dim
    kv_heads: Dim
    head_width: Dim
    block_size: Dim
    rows: Dim
    table_width: Dim
    window: Dim
    q_stride: Dim
    kv_stride: Dim
    q: ReadF32[D]
    k: ReadF32[D] | None = None
    v: ReadF32[D] | None = None
    k_cache: UpdateBytes[D]
    v_cache: UpdateBytes[D]
    y: WriteF32[D]
    positions: ReadI32[D]
    token_rows: ReadI32[D]
    starts: ReadI32[D]
    lengths: ReadI32[D]
    blocks: ReadI32[D]
    writes: ReadI32[D] | None = None
    cos: ReadF32[D] | None = None
    sin: ReadF32[D] | None = None
    q_norm: ReadF32[D] | None = None
    k_norm: ReadF32[D] | None = None
    sinks: ReadF32[D] | None = None
    scales: ReadF32[D] | None = None
    first_keys: ReadI32[D] | None = None
    scale: Real
    cap: Real = 0.0
    eps: Real = 0.0


class WriteKv(Instruction[D], opcode=14, flags=KV):
    """Write k and v [rows, heads, head_width] to the cache at positions writes."""

    rows: Dim
    heads: Dim
    head_width: Dim
    block_size: Dim
    kv_stride: Dim
    k: ReadF32[D]
    v: ReadF32[D]
    k_cache: UpdateBytes[D]
    v_cache: UpdateBytes[D]
    writes: ReadI32[D]
    scales: ReadF32[D] | None = None


class ReadCache(Instruction[D], opcode=15, flags=KV):
    """Convert a cache to float32 k and v [blocks, block_size, kv_heads, head_width]."""

    blocks: Dim
    block_size: Dim
    kv_heads: Dim
    head_width: Dim
    k_cache: ReadBytes[D]
    v_cache: ReadBytes[D]
    k: WriteF32[D]
    v: WriteF32[D]
    scales: ReadF32[D] | None = None


class TakeRows(Instruction[D], opcode=16):
    """y[i] = x[index[i]]; zeros for an index out of range of x [x_rows, width]."""

    rows: Dim
    width: Dim
    x_stride: Dim
    x_rows: Dim
    x: ReadF32[D]
    index: ReadI32[D]
    y: WriteF32[D]


class Sample(
    Instruction[D], opcode=17, flags=Flag.SAMPLE_RANDOM | Flag.SAMPLE_FILTERED
):
    """Sample one token for each row of logits, as the op ``sample`` defines it.

    Penalties are applied before. A row with NaN, or whose largest logit is infinite,
    has token -1; its slot's last token is 0. There are row_samples samples for each
    batch row: slots [samples / row_samples], params float32 [slots, 7], uniforms
    [samples]; the last token of each row is written to last[slot]. All four may be left
    out with SAMPLE_GREEDY.
    """

    samples: Dim
    vocabulary: Dim
    logits_stride: Dim
    row_samples: Dim
    logits: ReadF32[D]
    tokens: WriteI32[D]
    slots: ReadI32[D] | None = None
    last: UpdateI32[D] | None = None
    params: ReadF32[D] | None = None
    uniforms: ReadF32[D] | None = None


class Penalize(Instruction[D], opcode=18):
    """Apply penalties and bias to logits in place, for SAMPLE_FILTERED.

    Results are finite, but a row with invalid logits keeps or gets NaN.
    counts int32 and bias float32 are [slots, vocabulary]. The first decode_rows rows
    first count their input token (fed [rows]) as generated.
    """

    rows: Dim
    vocabulary: Dim
    logits_stride: Dim
    decode_rows: Dim
    logits: UpdateF32[D]
    slots: ReadI32[D]
    params: ReadF32[D]
    counts: UpdateI32[D]
    bias: ReadF32[D]
    fed: ReadI32[D]


class Pack(Instruction[D], opcode=19, flags=Flag.INTERLEAVE):
    """Pack source rows into rows first .. of a matrix whose data is zero.

    kind is an ``inl_kind``, and the matrix has the format that ``inl_packing`` gives
    for it. With INTERLEAVE row r goes to first + r / 16 * 32 + r % 16. codebook, which
    the kinds iq1, iq2 and iq3 require: the codes of each index, see
    :func:`inl.checkpoints.blocks.codebooks.codebook`.
    """

    rows: Dim
    columns: Dim
    first: Dim
    kind: Dim
    source: ReadBytes[D]
    matrix: UpdateMatrix[D]
    codebook: ReadBytes[D] | None = None


class Read(Instruction[D], opcode=20):
    """Read bytes (a multiple of 64) of x and write a checksum: measures bandwidth."""

    bytes: Dim
    x: ReadBytes[D]
    y: WriteU64[D]


class Checksum(Instruction[D], opcode=21):
    """Write a keyed checksum of each 4096 bytes of x.

    It is the universal hash NH (Black et al., UMAC, 1999) of 32-bit words: for a random
    key [1024], two blocks have equal sums with a probability of 2^-32.
    sums [bytes / 4096].
    """

    bytes: Dim
    x: ReadBytes[D]
    key: ReadU32[D]
    sums: WriteU64[D]


class Lora(Instruction[D], opcode=22):
    """y = base + B(A(x)) of the adapter that each row selects, as the op ``lora``.

    a [columns, inner], b [width, columns], selected [rows, columns]. A row without an
    adapter is copied. Each row has the same bits in any batch.
    """

    rows: Dim
    width: Dim
    inner: Dim
    columns: Dim
    rank: Dim
    x_stride: Dim
    base_stride: Dim
    base: ReadF32[D]
    x: ReadF32[D]
    a: ReadF32[D]
    b: ReadF32[D]
    selected: ReadF32[D]
    y: WriteF32[D]


class ExpertLinear(Instruction[D], opcode=23, flags=Flag.X_MASK | Flag.GATE_MASK):
    """y[s] = x[s / sharing] times the matrix of expert ids[s]; zeros for other ids.

    The matrix holds those of all experts, one after the other, each in whole tiles.
    With a gate, tiles of gate and up alternate, and y is activation(gate) * up.
    x [slots / sharing, K], ids [slots], y [slots, width]. Only matrices of chosen
    experts are read.
    """

    slots: Dim
    sharing: Dim
    experts: Dim
    width: Dim
    x_stride: Dim
    x: ReadF32[D]
    ids: ReadI32[D]
    matrix: ReadMatrix[D]
    y: WriteF32[D]


class CombineExperts(Instruction[D], opcode=24):
    """out[t] = sum of weights[t, s] * y[t, s] over the slots.

    y [rows, slots, width], weights [rows, slots].
    """

    rows: Dim
    width: Dim
    slots: Dim
    y: ReadF32[D]
    weights: ReadF32[D]
    out: WriteF32[D]


class Route(Instruction[D], opcode=25):
    """The k experts of each row with the largest logits, and their weights.

    kind is the index of a kind of the op ``route``, renormalize is 0 or 1.
    logits [rows, experts], ids [rows, k], weights [rows, k].
    """

    rows: Dim
    experts: Dim
    k: Dim
    kind: Dim
    renormalize: Dim
    x_stride: Dim
    logits: ReadF32[D]
    ids: WriteI32[D]
    weights: WriteF32[D]


class SigmoidGate(Instruction[D], opcode=26):
    """y = x times the sigmoid of gate [rows], row by row."""

    rows: Dim
    width: Dim
    x_stride: Dim
    gate_stride: Dim
    x: ReadF32[D]
    gate: ReadF32[D]
    y: WriteF32[D]


class CausalConv(Instruction[D], opcode=27):
    """Convolution over each row's tokens and its slot, as the op ``causal_conv``.

    x, y [tokens, channels], weight [taps, channels], table [slots, taps - 1, channels].
    positions [tokens], starts [rows + 1], row_slots [rows] and used_counts are those of
    a step. Each row has the same bits in any batch and in any chunks.
    """

    tokens: Dim
    rows: Dim
    slots: Dim
    channels: Dim
    taps: Dim
    x_stride: Dim
    x: ReadF32[D]
    weight: ReadF32[D]
    table: UpdateF32[D]
    y: WriteF32[D]
    positions: ReadI32[D]
    starts: ReadI32[D]
    row_slots: ReadI32[D]
    used_counts: ReadI32[D]


class DeltaRule(Instruction[D], opcode=28):
    """Gated delta rule over each row's tokens and its slot, as the op ``delta_rule``.

    q, k [tokens, key_heads, key_width], with one stride; v, y [tokens, heads, width];
    a, b [tokens, heads]; table [slots, heads, key_width, width]. tiled is 0 or 1.
    positions [tokens],
    starts [rows + 1], row_slots [rows] and used_counts are those of a step. Each row
    has the same bits in any batch and in any chunks.
    """

    tokens: Dim
    rows: Dim
    slots: Dim
    key_heads: Dim
    heads: Dim
    key_width: Dim
    width: Dim
    key_stride: Dim
    v_stride: Dim
    tiled: Dim
    q: ReadF32[D]
    k: ReadF32[D]
    v: ReadF32[D]
    a: ReadF32[D]
    b: ReadF32[D]
    rate: ReadF32[D]
    shift: ReadF32[D]
    table: UpdateF32[D]
    y: WriteF32[D]
    positions: ReadI32[D]
    starts: ReadI32[D]
    row_slots: ReadI32[D]
    used_counts: ReadI32[D]
    eps: Real


class Activate(Instruction[D], opcode=29):
    """y = activation(x); in place. kind is the index of a kind of the op."""

    count: Dim
    kind: Dim
    x: ReadF32[D]
    y: WriteF32[D]


class Score(Instruction[D], opcode=30):
    """Log-probabilities of tokens [rows] and of the count most likely ones of a row.

    logits [rows, vocabulary], chosen [rows], ids and values [rows, count], in
    descending order, ties by id. A token that does not exist has NaN, and all of a row
    with NaN, or whose largest logit is infinite.
    """

    rows: Dim
    vocabulary: Dim
    logits_stride: Dim
    count: Dim
    logits: ReadF32[D]
    tokens: ReadI32[D]
    chosen: WriteF32[D]
    ids: WriteI32[D]
    values: WriteF32[D]


class SsmScan(Instruction[D], opcode=31):
    """Scan of Mamba-2 over each row's tokens and its slot, as the op ``ssm_scan``.

    x, y [tokens, heads, width]; b, c [tokens, groups, key_width], with one stride; dt
    [tokens, heads]; table [slots, heads, key_width, width]. positions [tokens], starts
    [rows + 1], row_slots [rows] and used_counts are those of a step. Each row has the
    same bits in any batch and in any chunks.
    """

    tokens: Dim
    rows: Dim
    slots: Dim
    groups: Dim
    heads: Dim
    key_width: Dim
    width: Dim
    x_stride: Dim
    key_stride: Dim
    dt_stride: Dim
    x: ReadF32[D]
    b: ReadF32[D]
    c: ReadF32[D]
    dt: ReadF32[D]
    rate: ReadF32[D]
    shift: ReadF32[D]
    skip: ReadF32[D]
    table: UpdateF32[D]
    y: WriteF32[D]
    positions: ReadI32[D]
    starts: ReadI32[D]
    row_slots: ReadI32[D]
    used_counts: ReadI32[D]


class LayerNorm(Instruction[D], opcode=32):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over each row.

    With delta, x + delta is normalized. y may be x or delta.
    """

    rows: Dim
    width: Dim
    x: ReadF32[D]
    delta: ReadF32[D] | None = None
    weight: ReadF32[D]
    bias: ReadF32[D] | None = None
    y: WriteF32[D]
    eps: Real


class FullAttention(Instruction[D], opcode=33):
    """Attention within whole sequences, as the ops ``full_attention`` and ``biased_``.

    y [tokens, heads * head_width], starts [sequences + 1], bias
    [2 * distances + 1, heads]. window is one more than that of the op; 0 is none.
    starts is not read before the program runs.
    """

    tokens: Dim
    heads: Dim
    kv_heads: Dim
    head_width: Dim
    sequences: Dim
    window: Dim
    distances: Dim
    q_stride: Dim
    k_stride: Dim
    v_stride: Dim
    q: ReadF32[D]
    k: ReadF32[D]
    v: ReadF32[D]
    starts: ReadI32[D]
    bias: ReadF32[D] | None = None
    y: WriteF32[D]
    scale: Real


Opcode = IntEnum(  # type: ignore[misc]
    "Opcode", {each.snake_name().upper(): n for n, each in INSTRUCTIONS.items()}
)
"""Opcodes by name, such as ``Opcode.RMS_NORM``."""
