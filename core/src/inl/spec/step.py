"""One step of a model: bucket, step arrays, per-slot tables and log-probabilities.

A tensor is opaque (``Array``): NumPy, torch, JAX or a
:class:`~inl.spec.strict_array.StrictArray`. Every tuple is a ``NamedTuple``, so that
frameworks treat it as a tree of arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""An opaque tensor: ``+ - *``, ``.shape``, ``.dtype``, static slices and reshapes."""

SAMPLERS = ("greedy", "sample", "sample_filtered")
"""Sampling methods in order of cost; a bucket is compiled for one of them."""

PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Columns of ``Tables.params``. "greedy" reads none, "sample" only the first."""

NEUTRAL = (0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
"""Values of :data:`PARAMS` that leave the distribution unchanged."""

INVALID_TOKEN = -1
"""Sampled token of a row whose logits have NaN or no finite maximum."""

NO_TOKEN = -2
"""Fills the row of a reply after its last token."""

MAX_STOP_IDS = 8
"""Default of :attr:`Bucket.stop_ids`."""

TOP = 20
"""Most probable tokens whose log-probabilities a "sample_filtered" step reports."""


class Bucket(NamedTuple):
    """Static shape of a compiled step: the hashable key of the program cache."""

    tokens: int
    """T: tokens computed in the step, including padding."""
    rows: int
    """R: sequences in the step, including padding."""
    tokens_per_row: int = 1
    """W: most tokens sampled per row: 1, or k + 1 to verify k drafted tokens."""
    sampler: str = "greedy"
    """One of :data:`SAMPLERS`."""
    repeat: int = 1
    """N: most decoding steps that the program computes one after the other. Above 1,
    all rows are decoding rows: ``tokens == rows`` and ``tokens_per_row == 1``."""
    stop_ids: int = MAX_STOP_IDS
    """Most stop ids of each row of a repeated step."""
    uniforms: int = 0
    """Uniform numbers of each row of a step that verifies drafts, at least 2 * W - 1; 0
    for that number."""

    @property
    def verifies(self) -> bool:
        """Whether every token is sampled, so that rows can verify drafted tokens."""
        return (
            self.tokens_per_row > 1 and self.tokens <= self.rows * self.tokens_per_row
        )

    @property
    def reply_width(self) -> int:
        """Tokens of each row of a reply: W, or N of a program of several steps."""
        return max(self.tokens_per_row, self.repeat)

    def share(self, ranks: int) -> Bucket:
        """Return the bucket of each of ``ranks`` that divide the rows."""
        if ranks == 1:
            return self
        return self._replace(tokens=self.tokens // ranks, rows=self.rows // ranks)

    @property
    def samples(self) -> int:
        """S: tokens sampled in the step: all if it verifies drafts, else W per row."""
        return self.tokens if self.verifies else self.rows * self.tokens_per_row


class Step(NamedTuple):
    """Index arrays of one step: int32, on the device.

    A backend whose index functions take int64 may make them int64.

    Decoding rows come first. Slot 0, block 0 and cache position 0 are reserved for
    padding, which reads and writes there. ``G`` cache groups, ``B`` blocks per
    sequence, ``S`` samples: :attr:`Bucket.samples`.
    """

    tokens: Array
    """[T] token ids."""
    positions: Array
    """[T] position of the token in its sequence."""
    rows: Array
    """[T] row of the token."""
    starts: Array
    """[R + 1] row r has tokens starts[r] .. starts[r + 1] - 1."""
    lengths: Array
    """[R] cached tokens after this step; 0 for padding."""
    slots: Array
    """[R] index of the row in per-slot state."""
    blocks: Array
    """[G, R, B] block table of each cache group."""
    writes: Array
    """[G, T] cache position of the token: block * block_size + offset."""
    samples: Array
    """[S] indices of the tokens to compute logits for."""
    adapters: Array
    """[R] adapter index of the row; 0 is none."""
    used_counts: Array
    """[3] numbers of decoding rows, rows and tokens, without padding."""
    uniforms: Array
    """[S] uniform random numbers from the host: float32 bits stored as int32."""
    plan: Any = ()
    """Results of ``Kernel.plan``, shared by all layers; opaque."""


class Tables(NamedTuple):
    """Per-slot tables on the device, int32 unless noted."""

    blocks: Array
    """[G, slots, B] block tables."""
    lengths: Array
    """[slots] cached tokens."""
    last: Array
    """[slots] last sampled token."""
    adapters: Array
    """[slots] adapter index; 0 is none."""
    params: Array
    """[slots, len(PARAMS)] float32 sampling parameters."""
    token_counts: Array
    """[slots, V] twice the token's count in the answer, plus 1 if the prompt contains
    it; [slots, 0] if no "sample_filtered" program is available."""
    bias: Array
    """[slots, V] or [slots, 0] float32, added to the logits."""


class Scores(NamedTuple):
    """Log-probabilities of a step; N = min(TOP, V)."""

    chosen: Array
    """[S] float32, of the sampled tokens."""
    ids: Array
    """[S, N] most probable tokens, in descending order."""
    values: Array
    """[S, N] float32, of ``ids``."""
