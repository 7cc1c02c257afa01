"""Token sampling, without random number generation: the host sends uniform numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from inl.ops.sample_cases import sample_cases, score_cases
from inl.spec.op import Case, Spec, elements, nbytes, op
from inl.spec.step import INVALID_TOKEN, PARAMS, TOP, Array, Scores, Step, Tables


def _shapes(_logits: Spec, step: Step, tables: Tables, **_: Any) -> tuple[Any, Any]:
    return Spec(step.samples.shape, "int32"), tables


def _traffic(
    _results: Any, logits: Any, step: Step, tables: Tables, *, sampler: str
) -> int:
    """Logits, a few numbers per sample, and the penalty tables of the rows."""
    moved = nbytes(logits) + 3 * nbytes(step.samples)
    if sampler == "sample_filtered":
        entry = nbytes((tables.token_counts, tables.bias)) // tables.lengths.shape[0]
        moved += entry * int(step.slots.shape[0])
    return moved


@op(
    shapes=_shapes,
    cases=sample_cases,
    consumes=("tables",),
    rounds=False,
    traffic=_traffic,
)
def sample(
    logits: Array, step: Step, tables: Tables, *, sampler: str
) -> tuple[Array, Tables]:
    """Sample one token per row of ``logits`` [S, V] and store it as its slot's last.

    "greedy" takes the highest logit, ties to the lowest id. "sample" divides by the
    slot's temperature (0 is greedy) and takes the first id at which the cumulative
    probability, in id order, exceeds the host's uniform number. "sample_filtered" first
    changes the logits and filters the tokens, in this order:

    1. the input token of each decoding row is added to its answer's token counts
    2. repetition penalty r, for tokens in prompt or answer: positive logits are divided
       by r, others multiplied; then frequency penalty times the token's count in the
       answer, and presence penalty if the count is not 0, are subtracted
    3. the bias is added
    4. division by the temperature
    5. top-k (0 is all), then top-p of the remaining tokens (those whose more probable
       predecessors sum to less than p), then min-p (minimum probability relative to the
       top token). Tokens are sorted by descending logit, ties by ascending id; at least
       one remains

    With neutral parameters it returns the same tokens as "sample". It requires one
    sample per row.

    A row with a NaN logit, or whose highest logit is not finite, has no distribution:
    its token is :data:`INVALID_TOKEN`, and 0 is stored as its slot's last.

    Returns tokens int32 [S] and the tables.
    """
    valid = np.isfinite(logits.max(-1))
    logits = np.where(valid[:, None], logits, 0)
    if sampler == "sample_filtered":
        tables = _count_inputs(step, tables)
        logits = _penalize(logits, step.slots, tables)
    tokens = np.argmax(logits, axis=-1)
    if sampler != "greedy":
        per_row = step.samples.shape[0] // step.slots.shape[0]
        params = np.repeat(tables.params[step.slots], per_row, axis=0)[:, :, None]
        hot = params[:, 0] > 0
        scaled = _scale(logits, np.where(hot, params[:, 0], 1))
        allowed = (
            allowed_tokens(scaled, params) if sampler == "sample_filtered" else True
        )
        drawn = _draw(np.where(allowed, np.exp(scaled), 0), step.uniforms)
        tokens = np.where(hot[:, 0], drawn, tokens)
    tokens = np.where(valid, tokens, INVALID_TOKEN).astype(np.int32)
    last = tables.last.copy()
    last[step.slots] = tokens.reshape(step.slots.shape[0], -1)[:, -1].clip(min=0)
    return tokens, tables._replace(last=last)


def is_decided(
    logits: Sequence[Any], step: Step, tables: Tables, margin: float, *, full: bool
) -> bool:
    """Return whether the sampled tokens are robust to rounding; one sample per row.

    logits: several versions of [S, V]. They are robust if they stay the same when the
    uniform numbers, or top-p and min-p, change by ``margin``.
    """
    slots = np.tile(step.slots, len(logits))
    rows = np.concatenate(list(logits))
    if full:
        tables = _count_inputs(step, tables)
        rows = _penalize(rows, slots, tables)
    shifts, shares = margin * np.array([(0, 1, -1, 0, 0), (0, 0, 0, 1, -1)])
    copies = len(shifts)
    params = np.tile(tables.params[slots].astype(np.float64), (copies, 1))[:, :, None]
    hot = params[:, 0] > 0
    scaled = _scale(np.tile(rows, (copies, 1)), np.where(hot, params[:, 0], 1))
    params[:, 2:4] *= 1 + np.repeat(shares, len(slots))[:, None, None]
    allowed = allowed_tokens(scaled, params) if full else True
    uniforms = np.tile(step.uniforms.view(np.float32), len(logits) * copies)
    uniforms = (uniforms + np.repeat(shifts, len(slots))).astype(np.float32)
    drawn = _draw(np.where(allowed, np.exp(scaled), 0), uniforms)
    drawn = np.where(hot[:, 0], drawn, 0).reshape(copies, -1)
    return bool((drawn == drawn[0]).all())


def _count_inputs(step: Step, tables: Tables) -> Tables:
    """Add the input token of each decoding row to its answer's token counts."""
    inputs = step.tokens[np.minimum(step.starts[:-1], step.tokens.shape[0] - 1)]
    decoding = np.arange(inputs.shape[0]) < step.used_counts[0]
    counts = tables.token_counts.copy()
    counts[step.slots, inputs] += 2 * decoding.astype(np.int32)
    return tables._replace(token_counts=counts)


def _penalize(logits: Any, slots: Any, tables: Tables) -> Any:
    counts = tables.token_counts[slots]
    param = dict(zip(PARAMS, tables.params[slots].T[:, :, None], strict=True))
    factor = param["repetition_penalty"]
    factor = np.where((counts > 0) & (factor > 0), factor, 1)
    logits = np.where(logits > 0, logits / factor, logits * factor)
    answered = counts >> 1
    frequency = param["frequency_penalty"] * answered.astype(np.float32)
    presence = param["presence_penalty"] * (answered > 0)
    return logits - frequency - presence + tables.bias[slots]


def _scale(logits: Any, temperature: Any) -> Any:
    # Subtract the maximum first: a tiny temperature then gives -inf and not NaN.
    with np.errstate(over="ignore"):
        return (logits - logits.max(-1, keepdims=True)) / temperature


def allowed_tokens(scaled: Any, params: Any) -> Any:
    """Return which tokens top-k, top-p and min-p allow: bool [S, V]."""
    top_k, top_p, min_p = params[:, 1], params[:, 2], params[:, 3]
    order = np.argsort(-scaled, axis=-1, kind="stable")
    rank = np.arange(scaled.shape[-1])
    mass = np.exp(np.take_along_axis(scaled, order, -1))
    allowed = (rank < top_k) | (top_k < 1)
    total = np.cumsum(np.where(allowed, mass, 0), axis=-1)
    before = np.concatenate([np.zeros_like(total[:, :1]), total[:, :-1]], axis=-1)
    allowed &= (before < top_p * total[:, -1:]) | (top_p >= 1)
    allowed &= mass >= min_p
    allowed[:, 0] = True
    result = np.empty_like(allowed)
    np.put_along_axis(result, order, allowed, -1)
    return result


def _draw(mass: Any, uniforms: Any) -> Any:
    """Return the first id at which the cumulative mass exceeds the uniform share."""
    total = np.cumsum(mass, axis=-1)
    below = total <= uniforms.view(np.float32)[:, None] * total[:, -1:]
    return np.minimum(below.sum(-1), mass.shape[-1] - 1)


def _score_shapes(logits: Spec, tokens: Spec) -> Scores:
    top = (logits.shape[0], min(TOP, logits.shape[1]))
    return Scores(
        chosen=Spec(tokens.shape, "float32"),
        ids=Spec(top, "int32"),
        values=Spec(top, "float32"),
    )


@op(
    shapes=_score_shapes,
    cases=score_cases,
    rounds=False,
    flops=lambda logits, _tokens: 2 * elements(logits),
)
def score(logits: Array, tokens: Array) -> Scores:
    """Log-probabilities of the sampled ``tokens`` [S] and of the most probable ones.

    They are the model's own, ``log_softmax(logits)`` in float32, before penalties,
    bias, temperature and filters, as in vLLM and the OpenAI API. Equal logits are in
    ascending order of ids. The scores of a row whose token is :data:`INVALID_TOKEN` are
    undefined.
    """
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
    chosen = np.take_along_axis(logs, tokens[:, None], -1)[:, 0]
    return Scores(chosen=chosen, ids=ids, values=np.take_along_axis(logs, ids, -1))


def _mask_cases(rng: np.random.Generator) -> Iterable[Case]:
    for vocab in (5, 64, 77):
        words = rng.integers(-(2**31), 2**31, (3, -(-vocab // 32))).astype(np.int32)
        yield Case(f"3x{vocab}", (rng.standard_normal((3, vocab)), words))


@op(
    shapes=lambda logits, masks: Spec(logits.shape, "float32"),  # noqa: ARG005
    cases=_mask_cases,
    rounds=False,
)
def mask_logits(logits: Array, masks: Array) -> Array:
    """Replace masked logits by -1e30: bit ``t % 32`` of ``masks[s, t // 32]`` is 0.

    logits: [S, V]. masks: int32 [S, ceil(V / 32)]. A finite value avoids NaN in a row
    without allowed tokens. Returns float32 [S, V].
    """
    index = np.arange(logits.shape[-1])
    allowed = (masks[:, index // 32] >> (index % 32).astype(np.int32)) & 1
    return np.where(allowed == 1, logits, np.float32(-1e30))
